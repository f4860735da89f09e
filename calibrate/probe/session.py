"""A probe session, parent side. Samples are written to disk at once; an interrupted session can be resumed.

The folder holds samples.csv (every sample) and probe.yaml (the settings and the description of the backend).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Optional, Union

from pydantic import Field
from servesim.calibrate.device.worker_client import Worker
from servesim.core import BadInput
from servesim.costs.device_profile import round_numbers
from servesim.costs.profile_file import SamplingKeys
from servesim.files.checked import AtLeast0, Stored, Whole, expects, validate
from servesim.files.step_table import append_steps, write_steps
from servesim.files.write import write_yaml
from servesim.files.yaml_reader import read_yaml
from servesim.runs.utilisation import write_counters
from servesim.study.progress import StatusLine

from .measure import COLUMNS, as_rows
from .samples import read_samples

PROBE_TIMEOUT_S = 1800.0  # seconds without a progress report; one compilation may take long
FIXED_SETTINGS = (  # a resumed session must have the same values
    "backend", "model", "num_blocks", "block_size", "host_blocks", "max_rows", "max_tokens", "max_seq_len", "seed",
)  # fmt: skip
Median = Annotated[list[AtLeast0], Field(min_length=2, max_length=2), expects("rows and seconds")]


@dataclass
class ProbeSession:
    """The folder, the settings and the earlier samples of a probe."""

    folder: Path
    settings: dict[str, Any]  # of the worker, the model and the grid
    about: dict[str, Any] = field(default_factory=dict)  # description of the backend

    @property
    def samples(self) -> Path:
        """Path of samples.csv."""
        return self.folder / "samples.csv"

    def open(self, about: Mapping[str, Any]) -> list[dict[str, str]]:
        """Write probe.yaml; return the samples of an earlier session with the same settings."""
        self.about = {**about, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        earlier = read_probe(self.folder)
        if earlier is not None:
            self._check_same(earlier)
        elif self.samples.exists():
            raise BadInput(f"{self.folder}: holds samples from another source (no probe.yaml); use another folder")
        self.write_description()
        rows = [row.cells for row in read_samples(self.samples, resume=True)] if self.samples.exists() else []
        write_steps(self.samples, COLUMNS, as_rows(rows))  # without an incomplete last line
        return rows

    def write_description(self, sampling: Optional[Mapping[str, Any]] = None) -> None:
        """Write probe.yaml; `sampling` are the times of the selection of tokens, measured at the end."""
        content = {"settings": self.settings, "about": self.about, **({"sampling": sampling} if sampling else {})}
        write_yaml(self.folder / "probe.yaml", round_numbers(content))

    def _check_same(self, earlier: Mapping[str, Any]) -> None:
        settings, about = earlier.get("settings") or {}, earlier.get("about") or {}
        described = ("device", "kernels", "dtype", *(["sampling"] if "sampling" in about else []))
        pairs = {key: (settings.get(key), self.settings.get(key)) for key in FIXED_SETTINGS}
        pairs |= {key: (about.get(key), round_numbers(self.about.get(key))) for key in described}
        for key, (before, now) in pairs.items():
            if before != now:
                raise BadInput(f"{self.folder}: was probed with {key} {before}, now {now}; use another folder")


class ProbeAbout(Stored):
    """The keys of the description of the backend that a fit uses."""

    row_buckets: Optional[list[Whole]] = None
    token_buckets: Optional[list[Whole]] = None
    sampling: Optional[Union[str, SamplingKeys]] = None  # the variant, or the section of a profile


class ProbeFile(Stored):
    """The keys of probe.yaml."""

    settings: dict[str, Any] = Field({})
    about: ProbeAbout
    sampling: Optional[dict[str, Annotated[list[Median], Field(min_length=1)]]] = None


def read_probe(folder: Path) -> Optional[Mapping[str, Any]]:
    """Return the contents of a folder's probe.yaml, or None without one."""
    path = folder / "probe.yaml"
    if not path.exists():
        return None
    content = read_yaml(path)
    validate(ProbeFile, content, str(path))
    return dict(content)


def run_session(worker: Worker, session: ProbeSession, quiet: bool) -> dict[str, Any]:
    """Probe on a loaded worker and return its result. Samples taken before an error or a Ctrl-C stay on disk."""
    rows, line = session.open(worker.describe()), StatusLine(quiet)

    def on_report(report: Mapping[str, Any]) -> None:
        append_steps(session.samples, report["rows"])
        line.show(describe(report))

    try:
        result: dict[str, Any] = worker.call("probe", PROBE_TIMEOUT_S, on_report, resume=rows, **session.settings)
    finally:
        line.end()
    write_steps(session.samples, COLUMNS, result.pop("rows"))
    if result["counters"]["samples"]:
        write_counters(result["counters"]["samples"], session.folder / "device.csv")
    if result["power"] is not None:  # by kind of step; a fit reads it
        session.about["power"] = result["power"]
    session.write_description(result["sampling"])
    return result


def describe(report: Mapping[str, Any]) -> str:
    """Return the part of the probe that is done (of the points or of the time), the points, samples and time left."""
    budget = report["seconds"] + report["left"]
    spent = report["seconds"] / budget if budget > 0 else 1.0
    done = min(1.0, max(spent, report["known"] / max(report["points"], 1)))
    failed = f", {report['failed']} failed" if report["failed"] else ""
    points = f"probe: {100 * done:.0f} %, {report['known']}/{report['points']} points precise"
    return f"{points}, {report['samples']} samples{failed}, at most {report['left']:.0f} s left"

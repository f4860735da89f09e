"""A probe session, parent side. Samples are written to disk at once; an interrupted session can be resumed.

The folder holds samples.csv (every sample) and probe.yaml (the settings and the description of the backend).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Callable, Optional, Union

from pydantic import Field
from servesim.calibrate.device.worker_client import Worker
from servesim.core import BadInput
from servesim.costs.device_profile import round_numbers
from servesim.costs.profile_file import SamplingKeys
from servesim.files.checked import AtLeast0, Whole, expects, validate
from servesim.files.stored import Stored
from servesim.files.write import write_text, write_yaml
from servesim.files.yaml_reader import read_yaml
from servesim.runs.device_counters import write_counters

from .measure import as_csv
from .samples import append_samples, read_samples

PROBE_TIMEOUT_S = 1800.0  # seconds without a progress report; one compilation may take long
FIXED_SETTINGS = (  # a resumed session must have the same values
    "backend", "model", "blocks", "block_size", "host_blocks", "most_rows", "most_tokens", "longest", "seed",
)  # fmt: skip


@dataclass
class ProbeSession:
    """The folder, the settings and the earlier samples of a probe."""

    folder: Path
    settings: dict[str, Any]  # of the worker, the model and the grid
    about: dict[str, Any] = field(default_factory=dict)  # description of the backend
    resumed: int = 0  # samples of earlier sessions

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
        rows = [row.fields for row in read_samples(self.samples, resume=True)] if self.samples.exists() else []
        self.resumed = len(rows)
        self.write(as_csv(rows))
        return rows

    def write_description(self, sampling: Optional[Mapping[str, Any]] = None) -> None:
        """Write probe.yaml; `sampling` are the times of the selection of tokens, measured at the end."""
        content = {"settings": self.settings, "about": self.about, **({"sampling": sampling} if sampling else {})}
        write_yaml(self.folder / "probe.yaml", round_numbers(content))

    def _check_same(self, earlier: Mapping[str, Any]) -> None:
        settings, about = earlier.get("settings") or {}, earlier.get("about") or {}
        for key in FIXED_SETTINGS:
            if settings.get(key) != self.settings.get(key):
                raise BadInput(
                    f"{self.folder}: was probed with {key} {settings.get(key)}, now {self.settings.get(key)}; "
                    "use another folder"
                )
        for key in ("device", "kernels", "dtype", *(["sampling"] if "sampling" in about else [])):
            if about.get(key) != round_numbers(self.about.get(key)):
                raise BadInput(
                    f"{self.folder}: was probed with {key} {about.get(key)}, now {self.about.get(key)}; "
                    "use another folder"
                )

    def write_device(self, counters: Mapping[str, Any], power: Optional[Mapping[str, Any]]) -> None:
        """Write device.csv if there are samples; the power by kind of step is for probe.yaml, where a fit reads it."""
        if counters["samples"]:
            write_counters(counters["samples"], self.folder / "device.csv")
        if power is not None:
            self.about["power"] = power

    def write(self, text: str) -> None:
        """Write samples.csv: at the start the samples of earlier sessions, at the end all samples with flags."""
        write_text(self.samples, text)


class ProbeAbout(Stored):
    """The keys of the description of the backend that a fit uses."""

    gears: Optional[list[Whole]] = None
    token_gears: Optional[list[Whole]] = None
    sampling: Optional[Union[str, SamplingKeys]] = None  # the variant, or the section of a profile


Median = Annotated[list[AtLeast0], Field(min_length=2, max_length=2), expects("rows and seconds")]


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


def run_session(worker: Worker, session: ProbeSession, show: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Probe on a loaded worker and return its result. Samples taken before an error or a Ctrl-C stay on disk."""
    rows = session.open(worker.describe())

    def on_report(report: Mapping[str, Any]) -> None:
        append_samples(session.samples, report["rows"])
        show(report)

    result: dict[str, Any] = worker.call("probe", PROBE_TIMEOUT_S, on_report, resume=rows, **session.settings)
    session.write(result.pop("csv"))
    session.write_device(result["counters"], result["power"])
    session.write_description(result["sampling"])
    return result

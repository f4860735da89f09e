"""A probe session, parent side. Samples are written to disk at once; an interrupted session can be resumed.

The folder holds samples.csv (every sample) and probe.yaml (the settings and the description of the backend).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Callable, Optional, Union

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
from servesim.study.progress import REPORT_INTERVAL_S

from .measure import COLUMNS, as_rows
from .samples import read_samples

PROBE_TIMEOUT_S = 1800.0  # seconds without a progress report; one compilation may take long
FIXED_SETTINGS = (  # a resumed session must have the same values
    "backend", "model", "num_blocks", "block_size", "host_blocks", "max_rows", "max_tokens", "max_seq_len", "seed",
)  # fmt: skip
Median = Annotated[list[AtLeast0], Field(min_length=2, max_length=2), expects("rows and seconds")]
Show = Callable[[Mapping[str, Any]], None]


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
        self.write(as_rows(rows))
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

    def write_device(self, counters: Mapping[str, Any], power: Optional[Mapping[str, Any]]) -> None:
        """Write device.csv if there are samples; the power by kind of step is for probe.yaml, where a fit reads it."""
        if counters["samples"]:
            write_counters(counters["samples"], self.folder / "device.csv")
        if power is not None:
            self.about["power"] = power

    def write(self, rows: Sequence[Sequence[Any]]) -> None:
        """Write samples.csv: at the start the samples of earlier sessions, at the end all samples with flags."""
        write_steps(self.samples, COLUMNS, rows)


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


def run_session(worker: Worker, session: ProbeSession, show: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Probe on a loaded worker and return its result. Samples taken before an error or a Ctrl-C stay on disk."""
    rows = session.open(worker.describe())

    def on_report(report: Mapping[str, Any]) -> None:
        append_steps(session.samples, report["rows"])
        show(report)

    result: dict[str, Any] = worker.call("probe", PROBE_TIMEOUT_S, on_report, resume=rows, **session.settings)
    session.write(result.pop("rows"))
    session.write_device(result["counters"], result["power"])
    session.write_description(result["sampling"])
    return result


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Show]:
    """Yield a function that shows a report of the probe."""
    if quiet:
        yield lambda report: None
    elif sys.stderr.isatty():
        with bar() as show:
            yield show
    else:
        yield print_lines()


def describe(report: Mapping[str, Any]) -> str:
    """Return points done, samples and time left."""
    failed = f", {report['failed']} failed" if report["failed"] else ""
    points = f"{report['known']}/{report['points']} points precise"
    return f"{points}, {report['samples']} samples{failed}, at most {report['left']:.0f} s left"


def fraction_done(report: Mapping[str, Any]) -> float:
    """Return the part of the probe that is done: of the points or of the time."""
    budget = report["seconds"] + report["left"]
    spent = report["seconds"] / budget if budget > 0 else 1.0
    precise = report["known"] / report["points"] if report["points"] else 1.0
    return min(1.0, max(spent, precise))


@contextmanager
def bar() -> Iterator[Show]:
    """Show a bar."""
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # no monitor thread
    with tqdm(
        total=1.0, desc="probe", dynamic_ncols=True, bar_format="{desc}: {percentage:3.0f}%|{bar}|{postfix}"
    ) as line:

        def show(report: Mapping[str, Any]) -> None:
            line.n = max(line.n, fraction_done(report))
            line.set_postfix_str(describe(report))

        yield show


def print_lines() -> Show:
    """Return a function that prints a line if the last one is old."""
    printed_at = time.monotonic()

    def show(report: Mapping[str, Any]) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at >= REPORT_INTERVAL_S:
            printed_at = time.monotonic()
            print(f"probe: {100 * fraction_done(report):.0f} %, {describe(report)}", file=sys.stderr, flush=True)

    return show

"""One sitting of a probe, seen from the parent: samples are on disk as they come, and a sitting can be gone on with.

The folder holds samples.csv (every sample) and probe.yaml (what was probed and how, and what the device said it is).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable, Optional

import yaml
from servesim.calibrate.device.worker_client import Worker
from servesim.core import BadInput
from servesim.costs.device_profile import rounded
from servesim.files.write import open_text

from .measure import as_csv
from .samples import read_samples

QUIET = 1800.0  # seconds without a word after which a probe is given up: one compilation may take long
SAME = ("backend", "model", "blocks", "block_size", "host_blocks", "most_rows", "most_tokens", "longest", "seed")


@dataclass
class Sitting:
    """What a probe has to do and what it has so far."""

    folder: Path
    settings: dict[str, Any]  # of the worker, the model and the grid
    about: dict[str, Any] = field(default_factory=dict)  # what the device is
    resumed: int = 0  # samples that were there before

    @property
    def samples(self) -> Path:
        """The file of samples."""
        return self.folder / "samples.csv"

    def begin(self, about: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return the samples of an earlier sitting with the same settings, and make sure the folder can be written."""
        self.about = {**about, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        before = read_probe(self.folder)
        if before is not None:
            self._same(before)
        elif self.samples.exists():
            raise BadInput(f"{self.folder}: has samples of something else (no probe.yaml); name another folder")
        with open_text(self.folder / "probe.yaml") as file:
            yaml.safe_dump(rounded({"settings": self.settings, "about": self.about}), file, sort_keys=False)
        rows = [row.fields for row in read_samples(self.samples, resume=True)] if self.samples.exists() else []
        self.resumed = len(rows)
        self.write(as_csv(rows))
        return rows

    def _same(self, before: Mapping[str, Any]) -> None:
        settings, about = before.get("settings") or {}, before.get("about") or {}
        for key in SAME:
            if settings.get(key) != self.settings.get(key):
                raise BadInput(
                    f"{self.folder}: was probed with {key} {settings.get(key)}, now {self.settings.get(key)}; "
                    "name another folder"
                )
        for key in ("device", "kernels", "dtype"):
            if about.get(key) != rounded(self.about.get(key)):
                raise BadInput(f"{self.folder}: was probed on {key} {about.get(key)}, this is {self.about.get(key)}")

    def write(self, text: str) -> None:
        """Write all samples: those of an earlier sitting, and at the end all once more, outliers flagged."""
        with open_text(self.samples) as file:
            file.write(text)


def read_probe(folder: Path) -> Optional[Mapping[str, Any]]:
    """Return a folder's probe.yaml, if it has one."""
    path = folder / "probe.yaml"
    if not path.is_file():
        return None
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{path}: expected a mapping of settings and about")
    return found


def sit(worker: Worker, sitting: Sitting, told: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Probe on a loaded worker; return what came of it. What was measured is on disk however it ends."""
    rows = sitting.begin(worker.describe())

    def progress(report: Mapping[str, Any]) -> None:
        with sitting.samples.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(report["rows"])
        told(report)

    result: dict[str, Any] = worker.call("probe", QUIET, progress, resume=rows, **sitting.settings)
    sitting.write(result.pop("csv"))
    return result


@contextmanager
def bar(quiet: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Show how far a probe is: points whose median is known, and the time left."""
    if quiet:
        yield lambda report: None
        return
    from tqdm import tqdm

    with tqdm(unit="point", desc="probe", bar_format="{desc}: {n}/{total} points known {bar} {postfix}") as shown:

        def tell(report: Mapping[str, Any]) -> None:
            shown.total = report["points"]
            shown.n = report["known"]
            failed = f", {report['failed']} failed" if report["failed"] else ""
            shown.set_postfix_str(f"{report['samples']} samples{failed}, at most {report['left']:.0f} s left")

        yield tell

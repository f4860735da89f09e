"""Write a corrected profile: profile.yaml, and samples.csv with the source of every row."""

from __future__ import annotations

from pathlib import Path

from servesim.core import Shape
from servesim.costs.device_profile import write_profile
from servesim.files.write import csv_writer, open_text

from .correction import Correction

COLUMNS = ("kind", "point", "seconds", *Shape._fields, "source")


def write_corrected(folder: Path, correction: Correction) -> None:
    """Write the folder. profile.yaml is written last, so a folder with one is complete. An existing one stays."""
    if (folder / "profile.yaml").exists():
        return
    samples = correction.samples
    if samples is not None and not correction.note:
        with open_text(folder / "samples.csv") as file:
            writer = csv_writer(file)
            writer.writerow(COLUMNS)
            for k, shape in enumerate(samples.shapes):
                source = "measured" if k < correction.measured else "earlier profile"
                writer.writerow((samples.kinds[k], samples.points[k], f"{samples.seconds[k]:.9g}", *shape, source))
    write_profile(folder, correction.profile.about, correction.profile.cost)

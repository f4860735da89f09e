"""A profile as pandas frames: its samples beside what its costs say of them, its parameters, the runs it was judged by.

Times are seconds, errors are parts of what was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import pandas as pd
from servesim.calibrate.probe.samples import NEEDED, holds_steps, read_samples, samples_file
from servesim.core import BadInput, Shape
from servesim.costs.device_profile import Profile

JUDGED = ("fitted", "left_out", "predicted")  # runs of a fit from logs


@dataclass(frozen=True)
class Calibration:
    """A profile and what it rests on."""

    profile: Profile = field(repr=False)

    @property
    def about(self) -> dict[str, Any]:
        """What profile.yaml says beside the costs."""
        return dict(self.profile.about)

    @property
    def sampled(self) -> bool:
        """Whether single steps were measured."""
        return self._file is not None

    @property
    def _file(self) -> Optional[Path]:
        file = samples_file(self.profile.path)
        return file if file is not None and holds_steps(file) else None

    @cached_property
    def samples(self) -> pd.DataFrame:
        """A row a measured step: its shape, its seconds, what the costs expect, and the error of that.

        Failed points have no seconds; outliers are flagged.
        """
        if self._file is None:
            raise BadInput(f"profile {self.profile.name}: no samples of steps; it was not measured but fitted to runs")
        rows = read_samples(self._file)
        frame = pd.DataFrame([row.fields for row in rows], columns=None if rows else [*NEEDED]).apply(as_numbers)
        frame["seconds"] = pd.Series([row.seconds for row in rows], dtype=float)
        frame["expected"] = [self.profile.cost.seconds(row.shape) for row in rows]
        frame["error"] = frame.expected / frame.seconds - 1
        for name in ("flagged", "failed"):
            frame[name] = [getattr(row, name) for row in rows]
        return frame

    @cached_property
    def points(self) -> pd.DataFrame:
        """A row a point of the grid: its shape, samples taken, median seconds, what the costs expect, the error."""
        good = self.samples[(self.samples.failed == "") & (self.samples.flagged == "")]
        shape = {name: (name, "first") for name in ("kind", *Shape._fields, "expected")}
        frame = good.groupby("point").agg(
            **shape, taken=("seconds", "size"), seconds=("seconds", "median"), spread=("seconds", "std")
        )
        frame["error"] = frame.expected / frame.seconds - 1
        return frame

    @property
    def errors(self) -> pd.DataFrame:
        """By kind of step, what the fit is off by on points that it did not see."""
        found = {kind: error for kind, error in self.profile.error.items() if isinstance(error, dict)}
        return pd.DataFrame.from_dict(found, orient="index")

    @property
    def parameters(self) -> pd.DataFrame:
        """Fitted numbers with the bounds of their intervals, where the fit gave any."""
        found = (self.about.get("fit") or {}).get("parameters") or {}
        return pd.DataFrame.from_dict(found, orient="index", columns=["value", "error", "low", "high"])

    @property
    def runs(self) -> pd.DataFrame:
        """Real runs, measured and predicted: those fitted to, those left out in turn, those never seen."""
        fit = self.about.get("fit") or {}
        frames = [pd.DataFrame(fit[kind]).assign(used=kind) for kind in JUDGED if fit.get(kind)]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def __repr__(self) -> str:
        device, model = self.about.get("device", "?"), self.about.get("model", "?")
        return f"Calibration({self.profile.name}: {model} on {device})"


def as_numbers(column: pd.Series[Any]) -> pd.Series[Any]:
    """Return a column as numbers where all of it are."""
    try:
        return column if (column == "").any() else pd.to_numeric(column)
    except ValueError:
        return column

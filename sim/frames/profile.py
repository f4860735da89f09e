"""A profile as pandas frames: samples and predicted step times, cost parameters, and runs used to check it.

Times are seconds, errors are fractions of the measured value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import pandas as pd
from servesim.calibrate.probe.samples import read_samples, samples_file
from servesim.core import BadInput, Shape
from servesim.costs.device_profile import Profile
from servesim.costs.profile_verdict import verdict_on
from servesim.runs.run_warnings import source_notes
from servesim.study.columns import html_result

RUN_KINDS = ("fitted", "left_out", "predicted")  # in the record of a fit to logs


@dataclass(frozen=True)
class ProfileFrames:
    """A profile with its samples, parameters and errors."""

    profile: Profile = field(repr=False)

    @property
    def about(self) -> dict[str, Any]:
        """The keys of profile.yaml, without the costs."""
        return dict(self.profile.about)

    @property
    def sampled(self) -> bool:
        """Whether the profile has samples of single steps."""
        return self._file is not None

    @property
    def _file(self) -> Optional[Path]:
        return samples_file(self.profile.path)

    @cached_property
    def samples(self) -> pd.DataFrame:
        """One row per measured step: shape, measured seconds, predicted seconds, relative error.

        Failed points have no seconds; outliers are flagged.
        """
        if self._file is None:
            raise BadInput(f"profile {self.profile.name}: has no samples of steps, because it was fitted to whole runs")
        rows = read_samples(self._file)
        columns = None if rows else ["kind", "point", *Shape._fields]
        cells = [{**row.cells, "kind": row.kind, "point": row.point, **row.shape._asdict()} for row in rows]
        frame = pd.DataFrame(cells, columns=columns).apply(as_numbers)
        frame["seconds"] = pd.Series([row.seconds for row in rows], dtype=float)
        frame["expected"] = [self.profile.cost.seconds(row.shape) for row in rows]
        frame["error"] = frame.expected / frame.seconds - 1
        for name in ("flagged", "failed"):
            frame[name] = [getattr(row, name) for row in rows]
        return frame

    @cached_property
    def points(self) -> pd.DataFrame:
        """One row per grid point: shape, number of samples, median seconds, predicted seconds, relative error."""
        good = self.samples[(self.samples.failed == "") & (self.samples.flagged == "")]
        shape = {name: (name, "first") for name in ("kind", *Shape._fields, "expected")}
        frame = good.groupby("point").agg(
            **shape, taken=("seconds", "size"), seconds=("seconds", "median"), spread=("seconds", "std")
        )
        frame["error"] = frame.expected / frame.seconds - 1
        return frame

    @property
    def errors(self) -> pd.DataFrame:
        """Held-out error of the fit for each kind of step."""
        return pd.DataFrame.from_dict({kind: error or {} for kind, error in self.profile.error.items()}, orient="index")

    @property
    def verdict(self) -> str:
        """What the profile can be used for, and why: usable, for ranking only, or do not use."""
        return verdict_on(self.profile).text

    @property
    def parameters(self) -> pd.DataFrame:
        """Fitted parameters with their confidence intervals, if the fit has them."""
        parameters = (self.about.get("fit") or {}).get("parameters") or {}
        return pd.DataFrame.from_dict(parameters, orient="index", columns=["value", "error", "low", "high"])

    @property
    def runs(self) -> pd.DataFrame:
        """Real runs with measured and predicted makespan: fitted, left out in cross-validation, or predicted only."""
        fit = self.about.get("fit") or {}
        frames = [pd.DataFrame(fit[kind]).assign(used=kind) for kind in RUN_KINDS if fit.get(kind)]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def _repr_html_(self) -> str:
        facts = ("device", "model", "backend", "framework", "how", "date")
        cells = [["", ""], *([key, str(self.about[key])] for key in facts if self.about.get(key))]
        if "mean" in self.errors:
            cells += [
                [f"held-out error, {kind}", f"{error:.1%}"] for kind, error in self.errors["mean"].dropna().items()
            ]
        cells.append(["verdict", self.verdict])
        notes = [note.text for note in source_notes([self.profile])]
        return html_result(f"Profile: {self.profile.name}", cells, notes)

    def __repr__(self) -> str:
        device, model = self.about.get("device", "?"), self.about.get("model", "?")
        return f"ProfileFrames({self.profile.name}: {model} on {device})"


def as_numbers(column: pd.Series[Any]) -> pd.Series[Any]:
    """Return a column as numbers if all of its values are numbers."""
    try:
        return column if (column == "").any() else pd.to_numeric(column)
    except ValueError:
        return column

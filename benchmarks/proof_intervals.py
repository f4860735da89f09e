"""Predicted figures with intervals, as `sim run --intervals` has them; also figures that are no metric of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Optional

from servesim.calibrate.logs.fit import LogFit
from servesim.calibrate.logs.observed_runs import ObservedRun, Runs
from servesim.calibrate.logs.text import profile_about
from servesim.costs.device_profile import Profile
from servesim.runs.intervals import intervals_of
from servesim.runs.simulate import Run, simulate

DRAWS = 12  # cost models; the default of the command is 24
Figures = Mapping[str, float]
NO_LIMITS: tuple[Optional[float], Optional[float]] = (None, None)


class Predicted(NamedTuple):
    """Figures of a simulated run and their intervals."""

    run: Run  # the first one, if the figures are means over several
    figures: Figures
    limits: Mapping[str, tuple[float, float]]

    def interval(self, name: str) -> tuple[Optional[float], Optional[float]]:
        """Return the interval of a figure, two times None if it cannot be predicted."""
        return self.limits.get(name, NO_LIMITS)


def log_profile(fit: LogFit, runs: Runs) -> Profile:
    """Return the profile that `sim calibrate logs` writes."""
    return Profile(runs.name, fit.cost, profile_about(fit, runs))


def with_intervals(
    profile: Profile,
    predict: Callable[[Profile], tuple[Run, Figures]],
    predict_draw: Optional[Callable[[int, Profile], tuple[Run, Figures]]] = None,
) -> Predicted:
    """Return the figures of a profile, and their intervals from the cost models that represent its uncertainty.

    `predict_draw`: if the workload is random too, the figures of draw k with one of its replications.
    """
    run, figures = predict(profile)
    drawn = enumerate(profile.representatives(DRAWS))
    draws = [(predict(cost) if predict_draw is None else predict_draw(k, cost))[1] for k, cost in drawn]
    return Predicted(run, figures, intervals_of(run, draws, profile, figures=figures)["metrics"])


def predict_observed(run: ObservedRun, profile: Profile) -> Predicted:
    """Return the reported figures of a run, and its makespan."""

    def predict(drawn: Profile) -> tuple[Run, Figures]:
        done = simulate(run.scenario, run.trace, profile=drawn)
        figures = {
            f"{part.name} {name}".strip(): pair[1]
            for part in run.reported
            for name, pair in part.compare(done.measures).items()
        }
        return done, {**figures, "makespan": done.measures.makespan}

    return with_intervals(profile, predict)

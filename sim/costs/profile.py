"""A profile: the cost model of one device and model, its source and its error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional

from servesim.core import BadInput, StepCost

from .derived import (
    NO_LAUNCHES,
    CostWithHost,
    FirstUseCost,
    LaunchedCost,
    Launches,
    NoisyCost,
    OverlappedCost,
    SampledCost,
    SamplingTerm,
    host_of,
)
from .parts import NO_HOST, HostPart
from .uncertainty import RUN_SPREAD, SESSION_SPREAD, Uncertainty

FRONT_END = ("seconds", "per_request", "per_token")  # times of a front end


@dataclass(frozen=True)
class Profile:
    """A cost model and its description."""

    name: str
    cost: StepCost
    about: Mapping[str, Any] = field(default_factory=dict)  # the other keys of profile.yaml
    path: Optional[Path] = None
    digest: str = ""  # hash of the folder's content
    drawn: Optional[tuple[int, int]] = None  # of one of several cost models that represent it: its number, and how many

    def section(self, key: str) -> Mapping[str, Any]:
        """Return a section of profile.yaml, an empty one if it is missing or null."""
        return self.about.get(key) or {}

    @property
    def cold_start(self) -> tuple[float, float]:
        """Extra seconds of the first prefill and of the first decode, if the scenario does not say how it starts."""
        cold = self.section("cold_start")
        return float(cold.get("prefill") or 0.0), float(cold.get("decode") or 0.0)

    def measured_cold_start(self) -> tuple[float, float]:
        """Return the extra seconds of the first calls of a server that was not warmed up."""
        cold = self.section("cold") or self.section("cold_start")
        if not cold:
            raise BadInput(
                f"engine.start: profile {self.name} has no seconds of a cold start; give them as engine.cold_start"
            )
        return float(cold.get("prefill") or 0.0), float(cold.get("decode") or 0.0)

    @property
    def front_end(self) -> tuple[float, ...]:
        """Seconds from sending a request to the scheduler, per request and per prompt token; 0 if not measured."""
        front_end = self.section("front_end")
        return tuple(float(front_end.get(key) or 0.0) for key in FRONT_END)

    def cost_of_run(self, noise_seed: Optional[int] = None, warm: bool = False) -> StepCost:
        """Return the cost model of one run: with noise if there is a seed, and with the extra time of new shapes.

        A server that is warm has prepared all shapes.
        """
        cost = self.cost if noise_seed is None else self.with_noise(noise_seed)
        launch = float(self.section("launch").get("seconds") or 0.0)
        cost = LaunchedCost(cost, launch) if launch else cost
        first = self.about.get("first_use")
        return cost if warm or not first else FirstUseCost(cost, int(first["tokens"]), float(first["seconds"]))

    @property
    def sampling(self) -> dict[str, SamplingTerm]:
        """Seconds to select the next tokens, by name of the variant that was measured."""
        terms = self.section("sampling").get("terms") or {}
        return {str(name): SamplingTerm(float(term["step"]), float(term["row"])) for name, term in terms.items()}

    @property
    def sampling_used(self) -> Optional[str]:
        """The variant that the measured steps used, or None if the profile does not say it."""
        used = self.section("sampling").get("used")
        return None if used is None else str(used)

    def for_run(self, sampling: Optional[str] = None, host: HostPart = NO_HOST) -> Profile:
        """Return the profile of a run that selects tokens in this way; None is the way of the measured steps.

        A host time that was measured in the run replaces that of the profile.
        """
        profile = replace(self, cost=CostWithHost(self.cost, host)) if host != NO_HOST else self
        return profile._with_sampling(sampling)

    def overlapped(self, saved: HostPart = NO_HOST) -> Profile:
        """Return the profile of an engine with steps in flight: the host works while the device runs.

        `saved`: by how much such a step is shorter than one of the profile, if the profile does not say it.
        """
        stored, launches = self.section("in_flight"), NO_LAUNCHES
        if stored:
            buckets = (int((self.about.get(key) or (0,))[-1]) for key in ("token_buckets", "row_buckets"))
            saved, launches = HostPart(float(stored["step"])), Launches(float(stored["launch"]), *buckets)
        if not stored and saved == NO_HOST == host_of(self.cost)[0]:
            return self
        return replace(self, cost=OverlappedCost(self.cost, saved, launches))

    def _with_sampling(self, variant: Optional[str]) -> Profile:
        used, terms = self.sampling_used, self.sampling
        if variant is None or variant == used:
            return self
        if variant not in terms or used not in terms:
            known = f"only of {', '.join(terms)}" if terms else "of none"
            raise BadInput(
                f"engine.sampling: profile {self.name} has no time of {variant}, {known}; "
                "measure it with `sim calibrate probe`"
            )
        new, old = terms[variant], terms[used]
        cost = SampledCost(self.cost, SamplingTerm(new.step - old.step, new.row - old.row))
        return replace(self, cost=cost, about={**self.about, "sampling": {**self.about["sampling"], "used": variant}})

    @property
    def error(self) -> Mapping[str, Any]:
        """Held-out error per kind of step, as fractions of the measured time: mean, and largest or quantiles."""
        return dict(self.section("error"))

    @property
    def mean_errors(self) -> dict[str, float]:
        """Mean held-out error per kind of step, or of the times of whole runs."""
        means = {str(kind): (error or {}).get("mean") for kind, error in self.error.items()}
        return {kind: abs(float(mean)) for kind, mean in means.items() if mean is not None}

    def with_noise(self, seed: int) -> StepCost:
        """Return a cost model with the noise of the measured steps; the seed makes it reproducible."""
        noise = self.about.get("noise")
        if not isinstance(noise, Mapping) or not noise:
            raise BadInput(f"noise: profile {self.name} has no measured noise; measure it with `sim calibrate probe`")
        return NoisyCost(self.cost, noise, seed)

    @property
    def uncertainty(self) -> Uncertainty:
        """The joint uncertainty of the parameters; without one in the profile, only the spread between sessions."""
        stored = self.section("uncertainty")
        session = stored.get("session")
        spread = SESSION_SPREAD if session is None else float(session)
        return Uncertainty(stored.get("draws") or (), spread, float(stored.get("ttft") or 0.0))

    def in_same_session(self) -> Profile:
        """Return the profile for a run of the session that measured it: step times vary less than between sessions."""
        stored = {**self.section("uncertainty"), "session": min(self.uncertainty.session, RUN_SPREAD)}
        return replace(self, about={**self.about, "uncertainty": stored})

    def measured_within(self, seconds: float, now: datetime) -> bool:
        """Return whether the profile was measured no longer ago than this."""
        try:
            date = datetime.fromisoformat(str(self.about.get("date")))
        except ValueError:
            return False
        date = date if date.tzinfo is not None else date.replace(tzinfo=timezone.utc)
        return abs((now - date).total_seconds()) <= seconds

    def representatives(self, count: int) -> list[Profile]:
        """Return profiles whose cost models represent the uncertainty of this one."""
        return [self.with_draw((number, count)) for number in range(count)]

    def with_draw(self, draw: Optional[tuple[int, int]]) -> Profile:
        """Return one of them; None: this profile."""
        return (
            self if draw is None else replace(self, cost=self.uncertainty.representative(self.cost, *draw), drawn=draw)
        )

    @property
    def misfit(self) -> float:
        """Systematic error of the cost model: root mean square of the held-out biases of its ranges, by points."""
        ranges = [stored for kind in self.section("error_by_range").values() for stored in kind.values()]
        points = sum(stored["points"] for stored in ranges)
        return math.sqrt(sum(stored["points"] * stored["bias"] ** 2 for stored in ranges) / points) if points else 0.0

    def distance_outside(self, largest: Mapping[str, float]) -> float:
        """Return the logarithm of the largest ratio of a value to the end of its measured range; 0: all are inside."""
        grid = self.section("grid")
        ratios = [value / grid[name][1] for name, value in largest.items() if name in grid and grid[name][1] > 0]
        return math.log(max(1.0, *ratios)) if ratios else 0.0

    def outside_range(self, largest: Mapping[str, float]) -> list[str]:
        """Return the values of a run's largest step, also context per row, that exceed the measured range."""
        grid = self.section("grid")
        return [
            f"{name} {value:g} (measured {grid[name][0]:g} to {grid[name][1]:g})"
            for name, value in largest.items()
            if name in grid and value > grid[name][1]
        ]

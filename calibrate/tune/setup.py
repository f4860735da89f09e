"""What a tuning run depends on: its limits and its experiment."""

from __future__ import annotations

import math
from dataclasses import dataclass

from servesim.core import BadInput
from servesim.costs.device_profile import load_profile
from servesim.study.experiment import Experiment

AS_ON_BACKEND = {"prefill_buckets": [], "decode_buckets": [1], "start": "warm"}  # a backend is warm and does not pad


@dataclass(frozen=True)
class Settings:
    """How long a tuning run goes on, and how it chooses."""

    device_seconds: float = math.inf
    rounds: int = 5  # with measurements
    top: int = 3  # leaders; also the measurements per round, without the baseline
    draws: int = 24
    repeat: int = 1  # measurements of each configuration


def tuned_experiment(experiment: Experiment, on_backend: bool) -> Experiment:
    """Return an experiment whose simulated runs equal the live ones. Reject parameters that a live run cannot have."""
    fixed = ["profile", "engine.sampling", *(f"engine.{key}" for key in AS_ON_BACKEND if on_backend)]
    if experiment.rates or experiment.auto_rates:
        raise BadInput("rates: not possible in `sim tune`, which measures at one request rate")
    for key in {key for assignment in experiment.configs for key in assignment}:
        if key in fixed:
            raise BadInput(f"params: {key}: sim tune measures on one device, so it cannot vary; remove it")
    check_sampling(experiment)
    if not on_backend:
        return experiment
    engine = {**(experiment.base.get("engine") or {}), **AS_ON_BACKEND}
    engine.pop("cold_start", None)
    return experiment.changed(base={**experiment.base, "engine": engine})


def check_sampling(experiment: Experiment) -> None:
    """Raise BadInput if the base selects tokens in another way than the profile: the loop corrects measured steps."""
    own = (experiment.base.get("engine") or {}).get("sampling")
    if own is None:
        return
    profile = load_profile(experiment.profile)
    if profile.sampling_used != own:
        raise BadInput(
            f"engine.sampling: sim tune needs a profile that was measured with {own}, got {profile.name}; "
            f"calibrate it with --option sampling={own}, or remove engine.sampling"
        )

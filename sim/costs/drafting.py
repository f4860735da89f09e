"""The time of the drafter in speculative decoding: given, measured, or by arithmetic from the cost model.

EAGLE, MTP and draft models guess one token of every row in a pass, so K drafts take K passes in each step. The first
pass computes all tokens of the step, also those of prompts. EAGLE and MTP have one layer and the head of the model. An
n-gram drafter searches the text on the host: this takes no time unless the scenario or the profile gives it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Optional

from servesim.core import BadInput, Shape, StepCost

from .derivation import derive_cost, setting_of
from .derived import ChangedCost, ScaledCost, without_host
from .linear import LinearCost
from .profile import Profile
from .public_models import find_model
from .uncertainty import has_parameters

ONE_LAYER = ("eagle", "eagle3", "mtp")
DRAFT_MODEL = "draft_model"


class DraftedCost(ChangedCost):
    """Another cost model, with the time of a drafter in every step that has rows."""

    def __init__(self, cost: StepCost, drafter: StepCost, passes: int = 1) -> None:
        super().__init__(cost)
        self.drafter = drafter  # its cost model
        self.passes = passes

    def change(self, seconds: float, shape: Shape) -> float:
        rows = shape.prefill_rows + shape.decode_rows
        if not rows:
            return seconds
        seconds += self.drafter.duration(shape._replace(swapped=0) if shape.swapped else shape)
        return seconds + (self.passes - 1) * self.drafter.decode(rows, rows, shape.context)


def with_drafter(
    cost: StepCost, profile: Profile, method: str, tokens: int, seconds: Optional[float] = None, model: str = ""
) -> StepCost:
    """Return the cost model of a run with `tokens` drafts per step: with the time of its drafter, if it is known.

    `seconds` per step replace those of the profile, and `model` is the name of a draft model.
    """
    if seconds is not None:
        return DraftedCost(cost, LinearCost(base=seconds)) if seconds else cost
    drafter = drafter_of(profile, method, model)
    passes = tokens if method in ONE_LAYER or method == DRAFT_MODEL else 1
    return cost if drafter is None or not tokens else DraftedCost(cost, drafter, passes)


def drafter_of(profile: Profile, method: str, model: str = "") -> Optional[StepCost]:
    """Return the cost model of one pass of a drafter, None if its time is not known."""
    return measured_drafter(profile, method) or derived_drafter(profile, method, model)


def measured_drafter(profile: Profile, method: str) -> Optional[StepCost]:
    """Return the cost model of a pass in the profile, None if it has none of this method."""
    stored = profile.section("drafting")
    if not stored or stored.get("method") not in (None, method):
        return None
    row = float(stored.get("row") or 0.0)
    token = float(stored.get("token") or 0.0)
    return LinearCost(base=float(stored["step"]), prefill_row=row, prefill_token=token, decode_row=row)


def derived_drafter(profile: Profile, method: str, model: str = "") -> Optional[StepCost]:
    """Return the cost model of a pass by arithmetic, None if a figure of the model or of the device is not known."""
    factor, cost = 1.0, profile.cost
    while isinstance(cost, ChangedCost):
        factor *= cost.factor if isinstance(cost, ScaledCost) else 1.0
        cost = cost.cost
    if not has_parameters(cost) or not (method in ONE_LAYER or (method == DRAFT_MODEL and model)):
        return None
    try:
        old = setting_of(replace(profile, cost=cost))
    except BadInput:  # costs of a scenario, for example, have no model
        return None
    one_layer = replace(old.model, layers=1, window=0, full_layers=0)
    drafting = find_model(model, "speculative.model") if model else one_layer
    new = replace(old, model=drafting, server=False)  # the step has the other times of a server once
    return ScaledCost(derive_cost(without_host(cost), old, new), factor)

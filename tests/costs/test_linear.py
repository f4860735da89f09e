"""The sum of terms: experts that a step reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from servesim.core import BadInput, Shape
from servesim.costs.derivation import Setting, derive_cost
from servesim.costs.linear import LinearCost
from servesim.costs.mapping import cost_from, cost_mapping
from servesim.costs.public_devices import DEVICES
from servesim.costs.public_models import PUBLIC_MODELS

COST = LinearCost(base=0.004, prefill_token=1e-5, decode_row=1e-5, context=1e-8, experts=0.008, expert_share=4 / 128)


def test_a_step_reads_the_experts_that_its_tokens_use() -> None:
    """One token uses 4 of 128 experts; two tokens have 1/8 of an expert in common on average."""
    assert COST.decode(1, 1, 0) == pytest.approx(0.00401 + 0.008 * 4 / 128)
    assert COST.decode(2, 2, 100) == pytest.approx(0.00402 + 1e-6 + 0.008 * 7.875 / 128)
    assert COST.decode(10_000, 10_000, 0) == pytest.approx(0.104 + 0.008)


def test_prompt_tokens_and_decodes_share_the_experts() -> None:
    """A prompt of many tokens uses all experts, so the decodes of the same step add none."""
    prompt = Shape(1, 4000, 4000, 4000**2)
    mixed = Shape(1, 4000, 4000, 4000**2, decode_rows=8, decode_live=8)
    assert COST.seconds(prompt) == pytest.approx(0.044 + 0.008)
    assert COST.seconds(mixed) - COST.seconds(prompt) == pytest.approx(8e-5)
    assert COST.seconds(Shape(decode_rows=8, decode_live=8, context=50)) == pytest.approx(COST.decode(8, 8, 50))


def test_experts_are_written_to_a_profile_and_checked() -> None:
    assert cost_from(cost_mapping(COST), "profile") == COST
    with pytest.raises(BadInput, match=r"profile\.expert_share: expected a number from 0 to 1, got 1\.5"):
        cost_from({"kind": "linear", "experts": 0.01, "expert_share": 1.5}, "profile")


def test_a_derived_cost_has_the_experts_of_the_new_model() -> None:
    """Twice the precision doubles the time to read the experts; another model has another share."""
    old = Setting(PUBLIC_MODELS["gpt-oss-120b"], DEVICES["H200"], "float8")
    assert derive_cost(COST, old, replace(old, dtype="bfloat16")).experts == pytest.approx(0.016)
    assert derive_cost(COST, old, replace(old, model=PUBLIC_MODELS["mixtral-8x7b"])).expert_share == 2 / 8

"""Fields of policies: their types give the checks, the messages, the help texts and the schema."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional

import pytest
from servesim.config.registry import SPECULATIVE, make_policy
from servesim.config.schema import scenario_schema
from servesim.core import AtLeast, Float0, Fraction, Int1, Policy
from servesim.core.fields import policy_fields
from servesim.policies import POLICIES
from servesim.policies.vllm_v1 import VLLMV1

UNLIMITED = {"low_chunk_size", "high_chunk_size", "fitted_a", "fitted_b"}  # numbers without a range of their own
ANY_TEXT = {"version"}  # a range of versions


@dataclass(frozen=True)
class Mine(Policy):
    """A policy with all kinds of fields."""

    batch: Int1 = 4  # requests per step
    part: Fraction = 0.5
    limit: Optional[Annotated[int, AtLeast(2)]] = None
    mode: Literal["fast", "slow", None] = "fast"  # how it works
    plain: int = 3  # no range
    patience: Float0 | None = None


@dataclass(frozen=True)
class Narrow(Mine):
    """A subclass: a plain type keeps the limits of the base class, another type replaces them."""

    batch: int = 8
    mode: Literal["fast"] = "fast"
    plain: Annotated[int, AtLeast(3)] = 3


@dataclass(frozen=True)
class Unknown(Mine):
    """A type that cannot be evaluated."""

    other: Missing = None  # noqa: F821


def refusal(kind: Any, **values: Any) -> str:
    """Return the message of a refused value; empty if it is accepted."""
    try:
        kind(**values)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", POLICIES)
def test_every_field_of_a_policy_has_choices_or_a_range_or_a_reason_for_none(name: str) -> None:
    for field in policy_fields(POLICIES[name]).values():
        if {int, float} & set(field.types):
            assert (field.range is None) == (field.name in UNLIMITED), field.name
        elif str in field.types:
            assert field.choices or field.name in ANY_TEXT, field.name
        else:
            assert field.types in ((bool,), (tuple[Any, ...],)), field.name


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_refuses_values_outside_the_choices_and_the_range(name: str) -> None:
    kind = POLICIES[name]
    for field in policy_fields(kind).values():
        if field.choices:
            known = ", ".join(map(str, field.choices))
            assert refusal(kind, **{field.name: "?"}) == f"{field.name}: expected one of {known}, got '?'"
        if field.range is not None:
            number, least = field.types[0], f"at least {field.range.minimum:g}"
            wrong = {number(field.range.minimum - 1): least, number(10**13): "at most 1e+12"}
            if number is float:
                wrong |= {float("nan"): least}
            for value, expected in wrong.items():
                assert refusal(kind, **{field.name: value}) == f"{field.name}: expected {expected}, got {value!r}"


def test_types_say_which_values_a_field_accepts() -> None:
    known = policy_fields(Mine)
    assert known["batch"].types == (int,) and known["batch"].range == AtLeast(1)
    assert known["limit"].types == (int, type(None)) and known["limit"].range == AtLeast(2)
    assert known["mode"].types == (str, type(None)) and known["mode"].choices == ("fast", "slow", None)
    assert known["plain"].types == (int,) and known["plain"].range is None
    assert known["patience"].types == (float, type(None)) and known["patience"].range == AtLeast(0)
    assert refusal(Mine, batch=0) == "batch: expected at least 1, got 0"
    assert refusal(Mine, batch=True) == "batch: expected at least 1, got True"
    assert refusal(Mine, part=1) == "part: expected a fraction below 1, got 1"
    assert refusal(Mine, part=-0.5) == "part: expected at least 0, got -0.5"
    assert refusal(Mine, limit=1) == "limit: expected at least 2, got 1"
    assert refusal(Mine, mode="x") == "mode: expected one of fast, slow, None, got 'x'"
    assert refusal(Mine, limit=None, mode=None, plain=-5) == ""


def test_a_subclass_keeps_what_it_does_not_declare() -> None:
    assert refusal(Narrow, batch=0) == "batch: expected at least 1, got 0"
    assert refusal(Narrow, plain=2) == "plain: expected at least 3, got 2"
    assert refusal(Narrow, mode="slow") == "mode: expected one of fast, got 'slow'"
    assert policy_fields(Narrow)["batch"].default == 8 and policy_fields(Narrow)["batch"].help == "requests per step"
    assert policy_fields(Mine)["plain"].range is None


def test_a_subclass_of_a_built_in_policy_keeps_its_limits() -> None:
    @dataclass(frozen=True)
    class Small(VLLMV1):
        max_num_seqs: int = 8

    assert refusal(Small, max_num_seqs=0) == "max_num_seqs: expected at least 1, got 0"
    assert refusal(Small, policy="x") == "policy: expected one of fcfs, priority, got 'x'"


def test_a_type_that_cannot_be_evaluated_has_no_limits_but_the_base_class_has() -> None:
    assert refusal(Unknown, other=3) == ""
    assert refusal(Unknown, batch=0) == "batch: expected at least 1, got 0"
    with pytest.raises(NameError, match="Missing"):
        policy_fields(Unknown)


def test_the_help_names_the_choices_unless_the_comment_does() -> None:
    assert policy_fields(Mine)["mode"].help == "how it works: fast, slow, null"
    assert policy_fields(POLICIES["vllm"])["preemption_mode"].help.startswith("recompute, or swap (to host blocks)")
    assert policy_fields(POLICIES["llm-serving"])["victim"].help == (
        "request to preempt: shortest, longest, newest, oldest, fewest-blocks"
    )


WITHOUT_ISL = {"scheduler_reserve_full_isl": False}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("vllm", {"max_num_seqs": 0}),
    ("vllm", {"max_num_seqs": "many"}),
    ("vllm", {"max_num_seqs": None}),
    ("vllm", {"max_num_seqs": 1e13}),
    ("vllm", {"policy": 3}),
    ("vllm", {"policy": "lifo"}),
    ("vllm", {"policy": "priority", "aging": 0.5}),
    ("vllm", {"policy": "priority", "preemption_mode": "swap"}),
    ("vllm", {"preemption_mode": 3}),
    ("vllm", {"watermark": 1}),
    ("vllm", {"delay_scope": "all"}),
    ("vllm-chunked", {"delay_scope": "request"}),
    ("vllm-chunked", {"long_prefill_token_threshold": 9}),
    ("vllm-v1", {"policy": "priority", "aging": 0.5}),
    ("vllm-v1", {"version": "0.18.0"}),
    ("vllm-v1", {"version": "0.23.0", "watermark": 0.1}),
    ("vllm-v1", {"version": "0.30.0", "max_num_active_seqs": 3}),
    ("vllm-v1", {"version": "0.33.0"}),
    ("vllm-v1", {"version": "0.19"}),
    ("vllm-v1", {"version": 0.19}),
    ("vllm-v1", {**WITHOUT_ISL, "version": "0.11.0", "policy": "priority"}),
    ("vllm-v1", {**WITHOUT_ISL, "version": "0.11.2", "enable_chunked_prefill": False}),
    ("vllm-ascend", {"policy": "priority"}),
    ("vllm-ascend", {"version": "0.12.0"}),
    ("vllm-ascend", {"version": "0.9.1", "enable_pd_transfer": True}),
    ("vllm-ascend", {"decode_max_num_seqs": 5}),
    ("vllm-mindspore", {"version": "0.9.1"}),
    ("vllm-ascend-batch-jobs", {"policy": "priority"}),
    ("vllm-ascend-recompute", {"async_scheduling": True}),
    ("vllm-ascend-dynamic-batch", {"profile_table": [[1, 2, 3]]}),
    ("vllm-ascend-profiling-chunk", {"smooth_factor": -1.0}),
    ("llm-serving", {"delay_factor": 2.0, "delay_variant": "none"}),
    ("llm-serving", {"delay_factor": 2.0, "strategy": "static"}),
    ("llm-serving", {"admission_hysteresis": 1, "strategy": "continuous"}),
    ("sglang", {"version": "0.4"}),
    ("sglang", {"version": "0.4.6", "prefill_decode_interval": 1}),
    ("mindie", {"stage_policy": "decode-first"}),
    ("sarathi", {"enable_dynamic_chunking_schedule": True}),
    ("sarathi", {"enable_dynamic_chunking_schedule": True, "low_chunk_size": 32, "high_chunk_size": 100}),
]


def test_settings_that_a_policy_refuses_are_one_line_with_the_key(expected_errors: Callable[..., None]) -> None:
    cases = {f"{name} {fields}": {"name": name, **fields} for name, fields in REFUSED}
    expected_errors("policy_fields", make_policy, cases)


def test_the_schema_has_the_fields_of_every_policy() -> None:
    rule = scenario_schema()["properties"]["policy"]
    selected = {option["if"]["properties"]["name"]["const"]: option["then"] for option in rule["allOf"]}
    assert set(selected) == set(POLICIES) == set(rule["properties"]["name"]["examples"])
    for name, kind in POLICIES.items():
        assert set(selected[name]["properties"]) == {"name", *policy_fields(kind)} - SPECULATIVE.keys()
    known = selected["vllm"]["properties"]
    assert known["max_num_seqs"]["type"] == "integer" and known["max_num_seqs"]["minimum"] == 1
    assert known["watermark"]["exclusiveMaximum"] == 1 and known["max_wait"]["type"] == ["number", "null"]
    assert known["preemption_mode"]["enum"] == [None, "recompute", "swap"]
    assert known["sort_running"]["type"] == "boolean" and known["sort_running"]["description"]

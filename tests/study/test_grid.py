"""The parameter grid: the configurations of `params` in a sweep file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from servesim.config.layers import apply_assignment
from servesim.study.grid import parse_values, unroll


def test_a_grid_is_every_combination_with_the_last_key_fastest() -> None:
    assert unroll({"policy.decode_batch": [1, 2], "policy.order": ["arrival", "priority"]}) == [
        {"policy.decode_batch": 1, "policy.order": "arrival"},
        {"policy.decode_batch": 1, "policy.order": "priority"},
        {"policy.decode_batch": 2, "policy.order": "arrival"},
        {"policy.decode_batch": 2, "policy.order": "priority"},
    ]


def test_a_list_of_grids_is_their_union() -> None:
    configs = unroll([{"policy.name": "a", "policy.x": [1, 2]}, {"policy.name": "b", "policy.y": 3}])
    assert configs == [
        {"policy.name": "a", "policy.x": 1},
        {"policy.name": "a", "policy.x": 2},
        {"policy.name": "b", "policy.y": 3},
    ]


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        ({"range": [0, 2], "step": 0.5}, [0.0, 0.5, 1.0, 1.5, 2.0]),
        ({"range": [1, 9], "step": 4}, [1, 5, 9]),
        ({"range": [0, 1], "step": 0.1}, [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
        ({"range": [0, 1], "step": 0.3}, [0.0, 0.3, 0.6, 0.9]),
        ({"range": [64, 1024], "count": 5, "scale": "log"}, [64, 128, 256, 512, 1024]),
        ({"range": [0.0, 1.0], "count": 3}, [0.0, 0.5, 1.0]),
        ({"range": [1, 3], "count": 9}, [1, 2, 3]),
        (7, [7]),
    ],
)
def test_ranges_include_both_ends_and_have_no_rounding_errors(spec: object, values: list[object]) -> None:
    parsed = parse_values("k", spec)
    assert parsed == values
    assert [type(value) for value in parsed] == [type(value) for value in values]


WRONG_PARAMS: Any = [
    {"a": []},
    {"a": {"rnage": [0, 1]}},
    {"a": {"range": [2, 1], "step": 1}},
    {"a": {"range": [0, 1]}},
    {"a": {"range": [0, 1], "step": 0}},
    {"a": {"range": [0, 4], "count": 3, "scale": "log"}},
    {"a": {"uniform": [0, 1]}},
    {"a": {"range": [0, "x"], "step": 1}},
    {"a": {"range": [0, 1], "stpe": 1}},
    {"seed": [1, 2]},
    [{"a": 1}, 3],
]


def test_bad_params_give_a_one_line_error(expected_errors: Callable[..., None]) -> None:
    expected_errors("params", unroll, WRONG_PARAMS)


def test_another_policy_name_drops_the_fields_of_the_old_policy() -> None:
    base = {"policy": {"name": "llm-serving", "decode_batch": 8}, "seed": 3}
    assert apply_assignment(base, {"policy.x": 1, "policy.name": "other"}) == {
        "policy": {"name": "other", "x": 1},
        "seed": 3,
    }
    assert apply_assignment(base, {"policy.name": "llm-serving"}) == base
    assert apply_assignment(base, {"policy": {"name": "other", "y": 2}})["policy"] == {"name": "other", "y": 2}
    assert apply_assignment({"policy": "vllm"}, {"policy.x": 1}) == {"policy": {"name": "vllm", "x": 1}}


def test_a_trace_replaces_a_workload() -> None:
    base = {"workload": {"contest": {"X": 1, "T": 2}}}
    assert apply_assignment(base, {"trace": "f.csv"}) == {"policy": {"name": "llm-serving"}, "trace": "f.csv"}
    assert apply_assignment(base, {"workload.contest.X": 5})["workload"] == {"contest": {"X": 5, "T": 2}}

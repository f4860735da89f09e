"""`sim config`: the schema describes every key, and `validate` finds the errors that a run would find."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from servesim.cli import main
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.traces.make.arrivals import ARRIVAL_KINDS
from servesim.traces.make.lengths import DISTRIBUTION_KINDS, PAIR_KINDS
from servesim.traces.make.synth import synthesise

LENGTHS = {"prompt": 5, "output": [1, 9]}


@pytest.fixture
def schema(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["config", "schema"]) == 0
    schema: dict[str, Any] = json.loads(capsys.readouterr().out)
    return schema


def sections(schema: dict[str, Any], start: Any) -> Iterator[str]:
    """Yield the sections that a part of the schema refers to, directly or indirectly."""
    waiting, seen = [start], set()
    while waiting:
        part = waiting.pop()
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
        name = part.get("$ref", "").rpartition("/")[2] if isinstance(part, dict) else ""
        if name and name not in seen:
            seen.add(name)
            waiting.append(schema["$defs"][name])
            yield name


def test_every_key_is_described(schema: dict[str, Any]) -> None:
    tables = {"": schema["properties"], **{name: part["properties"] for name, part in schema["$defs"].items()}}
    assert [(name, key) for name, keys in tables.items() for key in keys if not keys[key].get("description")] == []


def test_the_schema_of_a_workload_has_every_kind(schema: dict[str, Any]) -> None:
    names = set(sections(schema, schema["properties"]["workload"]))
    kinds = {model.__name__ for table in (ARRIVAL_KINDS, DISTRIBUTION_KINDS, PAIR_KINDS) for model in table.values()}
    assert kinds | {"Requests", "SeparateLengths", "Contest", "Mix"} <= names
    assert schema["$defs"]["Requests"]["oneOf"] == [{"required": ["requests"]}, {"required": ["duration"]}]
    assert schema["$defs"]["Closed"]["properties"]["users"]["minimum"] == 1


def test_scenario_keeps_its_workload_as_written() -> None:
    part = {"requests": 1e2, "arrivals": {"kind": "gamma", "rate": 4, "cv": 2}, "lengths": LENGTHS}
    workload = {"mix": [part, {"contest": {"X": 2, "T": 3}}]}
    kept = scenario_from({"workload": workload}).model_dump(mode="json")["workload"]
    assert json.dumps(kept) == json.dumps(workload)


def test_a_workload_with_priorities_can_be_read_back_from_json() -> None:
    workload = {"requests": 50, "arrivals": {"kind": "burst"}, "lengths": LENGTHS, "priorities": {0: 3, -1: 1}}
    again = scenario_from(json.loads(json.dumps({"workload": workload}))).workload
    assert again is not None
    assert [r.priority for r in synthesise(again).requests] == [r.priority for r in synthesise(workload).requests]


@pytest.mark.parametrize("key", ["requests", "limit", "priorities"])
def test_null_is_not_a_valid_value(key: str) -> None:
    workload = {"requests": 3, "arrivals": {"kind": "burst"}, "lengths": LENGTHS, key: None}
    with pytest.raises(BadInput, match=rf"^scenario: workload\.{key}: expected .*, got None$"):
        scenario_from({"workload": workload})

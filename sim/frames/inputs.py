"""Input of the Python API: files, mappings, policy objects, frames and results as scenarios, experiments and runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Union

import pandas as pd
from pydantic import PrivateAttr
from servesim.config.layers import Layer, Tree, assemble, file_layer
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput, Policy, Sampling
from servesim.core import field_values as fields_of
from servesim.core.content import Content
from servesim.core.limits import MAX_DRAWS, draw_count
from servesim.study.compared_runs import ComparedRuns, from_folder
from servesim.study.sweep_file import Source, mapping_of, paths_as_text
from servesim.traces.trace import Columns, Trace, build_trace

from .compare import runs_of_result
from .run import Result
from .sweep import RateSweepResult, SweepResult


class ScenarioWithPolicy(Scenario):
    """A scenario with a policy object instead of a policy name."""

    _policy: Policy = PrivateAttr()

    def make_policy(self) -> Policy:
        return self._policy


class RepeatedScenario(ScenarioWithPolicy):
    """A scenario with a policy object that runs several times: each run has a new copy."""

    def make_policy(self) -> Policy:
        return replace(self._policy)


def merge_scenario(
    source: Source, preset: Optional[str], keys: Tree, settings: Optional[Mapping[str, Any]] = None
) -> Tree:
    """Return the scenario tree of a preset, a file or mapping, arguments and settings; later ones win."""
    layers = [] if preset is None else [Layer({"preset": preset})]
    layers.append(file_layer(source) if isinstance(source, (str, Path)) else Layer(mapping_of(source, "scenario")))
    return assemble([*layers, Layer(keys), Layer(settings or {}, "settings", are_settings=True)])


def check_draws(intervals: Union[bool, int]) -> int:
    """Return the number of random cost models, 0 without intervals."""
    draws = draw_count(intervals)
    if draws is None:
        raise BadInput(f"intervals: expected true or a number of draws from 2 to {MAX_DRAWS}, got {intervals}")
    return draws


def scenario_keys(keys: Mapping[str, Any]) -> Tree:
    """Return the keys of a scenario that were given as arguments; a policy may be a name, a trace a path."""
    result: Tree = paths_as_text({key: value for key, value in keys.items() if value is not None})
    for key, name in (("policy", "name"), ("trace", "path")):
        if isinstance(result.get(key), str):
            result[key] = {name: result[key]}
    return result


def with_policy_object(
    scenario: Scenario, policy: Policy, kind: type[ScenarioWithPolicy] = ScenarioWithPolicy
) -> Scenario:
    """Return the scenario with a policy object."""
    tree = scenario.model_dump() | {"policy": {"name": type(policy).__name__, **fields_of(policy)}}
    result = kind.model_validate(tree)
    result._policy = policy
    return result


def requests_in(frame: pd.DataFrame) -> Trace:
    """Return the requests of a frame. Columns are request fields, the index holds the request ids."""
    known = (
        "arrival", "prompt", "output", "limit", "priority", "session", "content", "follows", "think_time", "sampling",
    )  # fmt: skip
    for name in ("arrival", "prompt", "output"):
        if name not in frame:
            raise BadInput(f"trace: expected a column {name}, got {', '.join(map(str, frame.columns))}")
        column = frame[name]
        if not pd.api.types.is_numeric_dtype(column) or column.isna().any() or (column < 0).any():
            raise BadInput(f"trace: column {name}: expected numbers of at least 0 in every row")
    lists: dict[str, Any] = {
        name: [None if pd.api.types.is_scalar(v) and pd.isna(v) else v for v in frame[name].tolist()]
        for name in known
        if name in frame
    }
    for prompt, content in zip(lists["prompt"], lists.get("content", ())):
        if content is not None and not (isinstance(content, Content) and [*content.ends][-1:] == [prompt]):
            raise BadInput("trace: column content: expected Content objects with as many tokens as their prompts")
    if any(not isinstance(sampling, (Sampling, type(None))) for sampling in lists.get("sampling", ())):
        raise BadInput("trace: column sampling: expected Sampling objects, or None for one answer")
    return build_trace(Columns(**lists, id=frame.index.tolist()), "frame", "frame")


def compared_runs(
    source: Any, where: str, settings: Optional[Mapping[str, Any]], simulate: Callable[[Tree, str], ComparedRuns]
) -> ComparedRuns:
    """Return a side of a comparison: a result, a folder, or a scenario that `simulate` runs."""
    if isinstance(source, Result):
        return runs_of_result(source)
    if isinstance(source, SweepResult):
        return source.compared_runs()
    if isinstance(source, (str, Path)):
        stored = from_folder(str(source))
        return stored or simulate(merge_scenario(source, None, {}, settings), str(source))
    if not isinstance(source, Mapping):
        hint = "; use result.at(RATE)" if isinstance(source, RateSweepResult) else ""
        expected = "a file, a folder, a mapping of scenario keys, or the result of a run or a sweep"
        raise BadInput(f"{where}: expected {expected}, got {type(source).__name__}{hint}")
    tree = merge_scenario(source, None, {}, settings)
    scenario = scenario_from(tree, where)
    return simulate(tree, scenario.name or str(scenario.policy["name"]))

"""Users' classes in Python work with the compiled package as with the plain one: dataclasses, copies, costs, files."""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import pkgutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import servesim
from servesim import api
from servesim.core import Chunk, ClientRequest, Hold, Plan, Policy, Request, Shape, StepCost, Stuck
from servesim.core.fields import policy_fields
from servesim.costs.linear import LinearCost
from servesim.costs.parts import DecodePart, PartsCost, PrefillPart
from servesim.engine.rules import rules_of
from servesim.policies import POLICIES
from servesim.policies.vllm_v1 import VLLMV1
from servesim.testing import ContractWorld, check_policy, draw_requests, simulated

from . import user_policies
from .user_policies import (
    FillBatch,
    NewDefaults,
    NewDefaultsByField,
    OwnState,
    Slots,
    SmallChunksVLLM,
    VLLMDefaults,
    WrappedVLLM,
)

GOOD = (FillBatch, NewDefaults, NewDefaultsByField, OwnState, Slots, SmallChunksVLLM, VLLMDefaults, WrappedVLLM)
COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "replace": replace,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", [*GOOD, *POLICIES.values()], ids=lambda kind: kind.__name__)
def test_a_policy_is_copied(kind: type[Policy], way: str) -> None:
    policy = kind(order="priority", aging=0.5)
    other = COPIES[way](policy)
    assert type(other) is kind and other == policy and hash(other) == hash(policy) and repr(other) == repr(policy)
    assert asdict(other) == asdict(policy)
    assert other != policy.replace(order="arrival")


@pytest.mark.parametrize("kind", [*GOOD, *POLICIES.values()], ids=lambda kind: kind.__name__)
def test_a_policy_is_frozen(kind: type[Policy]) -> None:
    with pytest.raises(FrozenInstanceError):
        kind().order = "priority"  # type: ignore[misc]


def test_new_defaults_of_inherited_fields_reach_the_engine() -> None:
    assert (NewDefaults().order, NewDefaults().max_wait, NewDefaults().batch) == ("shortest-prompt", 2, 3)
    assert NewDefaults().is_sorted and not FillBatch().is_sorted
    assert NewDefaultsByField().order == "longest-prompt" and NewDefaultsByField().max_wait == 0.5
    assert NewDefaults(order="arrival").is_sorted is False
    assert VLLMDefaults().max_num_seqs == 5 and VLLMV1().max_num_seqs == 128
    assert {field.name: field.default for field in fields(NewDefaults)}["order"] == "shortest-prompt"
    with pytest.raises(ValueError, match="order: expected one of"):
        NewDefaults(order="fastest")


@pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
def test_a_policy_follows_the_contract(kind: type[Policy]) -> None:
    for seed in range(2):
        check_policy(kind(), seed, lag=1 + seed)


def test_super_reaches_the_compiled_policy() -> None:
    world = ContractWorld(draw_requests(1))
    wrapped, built_in = (
        simulated(WrappedVLLM(few=1000, max_num_seqs=6), world),
        simulated(VLLMV1(max_num_seqs=6), world),
    )
    assert wrapped.times() == built_in.times()
    assert rules_of(VLLMDefaults()).engine == "mine" and rules_of(VLLMDefaults()).reserved_blocks == 3


class SlowStart(StepCost):
    """A cost model in Python: counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    @property
    def deterministic(self) -> bool:
        return False

    def seconds(self, shape: Shape) -> float:
        self.calls += 1
        return 1 / self.calls + shape.prefill_tokens  # an int for a prefill of the first call


@dataclass(frozen=True)
class OtherBase(LinearCost):
    """A built-in cost model with another default and twice the time."""

    base: float = 1

    def seconds(self, shape: Shape) -> float:
        return 2 * super().seconds(shape)


@pytest.mark.parametrize("make", [SlowStart, OtherBase])
def test_a_cost_model_in_python_gives_the_same_times_with_and_without_hold(make: Callable[[], Any]) -> None:
    requests = draw_requests(2)
    runs = [simulated(FillBatch(), ContractWorld(requests, cost=make()), forward) for forward in (True, False)]
    assert runs[0].times() == runs[1].times() and runs[0].stuck is None


def test_a_new_default_of_a_cost_model_is_used() -> None:
    assert OtherBase().base == 1 and OtherBase().seconds(Shape(prefill_rows=1)) == 2.0
    assert COPIES["pickle"](OtherBase()) == OtherBase() == COPIES["deepcopy"](OtherBase())


def test_whole_seconds_become_floats() -> None:
    for kind in (ClientRequest, Request):
        request = kind("a", 3, 5, 2, think_time=1)
        assert [type(number) for number in (request.arrival, request.think_time)] == [float, float]
    assert json.dumps(Request("a", 3, 5, 2).sent) == "3.0"


def test_counts_of_a_plan_are_ints_and_bools() -> None:
    plan, hold = Plan(decode=3, hold=True, padding_rows=True), Hold(True, False, past_finish=0)
    assert json.dumps([plan.decode, plan.decode_first, plan.padding_rows]) == "[true, false, 1]"
    assert json.dumps([plan.hold.steps, hold.steps, hold.keep_free, hold.past_finish]) == "[1, 1, 0, false]"
    with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
        Plan(hold=1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["pickle", "copy", "deepcopy"])
def test_requests_chunks_and_costs_are_copied(way: str) -> None:
    done = simulated(FillBatch(), ContractWorld(draw_requests(1))).requests[0]
    other = COPIES[way](done)
    assert repr(other) == repr(done) and other.finish == done.finish is not None and other.sent == done.sent
    request = ClientRequest("a", 3, 5, 2, 4, follows="b", think_time=2)
    assert COPIES[way](request).client_fields() == request.client_fields()
    chunk = COPIES[way](Chunk(done, 3, 2))
    assert (repr(chunk.request), chunk.tokens, chunk.blocks) == (repr(done), 3, 2)
    for cost in (LinearCost(base=2.0), PartsCost(PrefillPart([(1, 2.0)]), DecodePart([(1, 0.5)], context=1e-3))):
        assert COPIES[way](cost) == cost and COPIES[way](cost).decode(1, 1, 7) == cost.decode(1, 1, 7)


def test_the_help_of_inherited_fields_is_found() -> None:
    known = policy_fields(WrappedVLLM)
    assert known["few"].help == "running requests"
    assert all(known[field.name].help for field in fields(VLLMV1))


def test_errors_can_be_copied() -> None:
    stuck = Stuck("no plan", [Request("a", 0, 5, 2)], 3)
    assert str(stuck) == "stuck at t=3 s: no plan (requests a)"
    assert str(Stuck(*stuck.args)) == str(stuck)  # SimPy makes the error of a process again
    with pytest.raises(Stuck):
        raise stuck from KeyError("x")


def test_a_sweep_runs_a_policy_of_a_file_in_worker_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_bytes(Path(user_policies.__file__).read_bytes())
    base = {"policy": "mine.py:NewDefaults", "workload": {"contest": {"X": 2, "T": 8}}}
    sweep = {"base": base, "params": {"policy.batch": [2, 4]}, "objectives": ["mean_ttft_ms"]}
    results = [api.sweep(sweep, jobs=jobs).runs.to_csv() for jobs in (1, 2)]
    assert results[0] == results[1]


def test_classes_of_the_package_in_python_may_have_compiled_bases() -> None:
    """A compiled class that is not marked refuses subclasses in Python, when the first instance is made."""
    found = 0
    for module in interpreted_modules():
        for kind in vars(module).values():
            if not isinstance(kind, type) or kind.__module__ != module.__name__:
                continue
            for base in kind.__bases__:
                if str(getattr(sys.modules[base.__module__], "__file__", "")).endswith(".so"):
                    base.__new__(kind)
                    found += 1
    assert found or str(sys.modules[Policy.__module__].__file__).endswith(".py")


def interpreted_modules() -> Iterator[Any]:
    """Import every module of the package that is not compiled, except those of engines that are not installed."""
    for info in pkgutil.walk_packages(servesim.__path__, "servesim."):
        try:
            module = None if info.name.endswith("__main__") else importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            if str(error.name).startswith("servesim"):
                raise
            continue
        if module is not None and str(module.__file__).endswith(".py"):
            yield module

"""Policies written for 0.1 run unchanged: keywords of Plan, unpacked chunks, class attributes, `_replace`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from servesim.core import FOREVER, Chunk, Eviction, Plan, Policy, Rejection, Request, View, traits_of
from servesim.engine.server import Server
from servesim.policies.vllm_v1 import VLLMV1
from servesim.testing import check_policy


@dataclass(frozen=True)
class Old(Policy):
    """A batch that is filled in order of arrival, as one would have written it for 0.1."""

    batch: int = 4  # requests that run at once

    mirrors: ClassVar[str] = "an engine of mine 1.0"
    proof: ClassVar[str] = "nothing"
    null_blocks: ClassVar[int] = 2
    refuses: ClassVar[bool] = True
    running_order: ClassVar[str] = "slot"

    def decide(self, view: View) -> Plan:
        free, chunks = view.pool.free, []
        for request in view.waiting:
            blocks = view.pool.blocks(request.prompt + request.limit)
            if blocks > free or len(view.running) + len(chunks) == self.batch:
                break
            free -= blocks
            chunks.append(Chunk(request, request.pending, blocks))
        if chunks:
            return Plan(chunks=chunks)
        return Plan(decode=view.decoding > 0, hold=FOREVER)


def test_the_class_attributes_of_0_1_are_traits() -> None:
    traits = traits_of(Old())
    assert (traits.engine, traits.validated_against, traits.running_order) == (
        "an engine of mine 1.0",
        "nothing",
        "slot",
    )
    assert (traits.reserved_blocks, traits.rejects_oversized) == (2, True)
    assert not traits.frees_blocks_late


def test_a_subclass_of_a_built_in_policy_may_set_one_of_them() -> None:
    class Strict(VLLMV1):
        refuses: ClassVar[bool] = True

    assert traits_of(Strict()).rejects_oversized
    assert not traits_of(VLLMV1()).rejects_oversized
    assert traits_of(Strict()).engine == VLLMV1().traits.engine


def test_a_policy_of_0_1_follows_the_contract() -> None:
    for seed in range(4):
        check_policy(Old(), seed)


def test_reserved_blocks_are_not_in_the_pool() -> None:
    assert Server(Old(), 12, 4).pool.total == 10


def test_a_plan_reads_and_changes_as_in_0_1() -> None:
    request = Request("a", 0.0, 8, 4)
    plan = Plan(evict=[Eviction(request)], reject=[Rejection(request, "why")], decode=True)
    assert plan.evict == [Eviction(request, "recompute", "front")]
    assert plan.reject[0].reason == "why"
    assert (plan.admit, plan.swap_in, plan.waiting) == ((), (), None)
    held = plan._replace(hold=3, evict=())
    assert (held.hold, held.evict, held.reject, held.decode) == (3, (), plan.reject, True)
    assert plan == Plan(evict=[Eviction(request)], reject=[Rejection(request, "why")], decode=True)
    assert plan != held
    with pytest.raises(AttributeError, match="no field 'evictions'"):
        plan.evictions  # noqa: B018
    with pytest.raises(TypeError):
        Plan(evictions=())  # type: ignore[call-arg]
    tokens, blocks = list(Chunk(request, 8, 2))[1:]
    assert (tokens, blocks) == (8, 2)
    assert "hold=3" in repr(held) and "evict" not in repr(held)

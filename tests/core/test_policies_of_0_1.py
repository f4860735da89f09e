"""Policies written for 0.1 run unchanged: keywords of Plan, unpacked chunks, class attributes, `_replace`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from servesim.core import (  # fmt: skip
    FOREVER,
    Chunk,
    Eviction,
    Plan,
    Policy,
    Rejection,
    Request,
    View,
    at_least,
    just_after,
    one_of,
    settings,
    traits_of,
)
from servesim.engine.server import Server
from servesim.policies.vllm_v1 import VLLMV1
from servesim.testing import check_policy

from ..scenarios import serve


@dataclass(frozen=True)
class OldPolicy(Policy):
    """Fills the batch in order of arrival; written in the style of 0.1."""

    batch: int = 4  # maximum running requests

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


def test_class_attributes_of_0_1_become_traits() -> None:
    traits = traits_of(OldPolicy())
    assert (traits.engine, traits.validated_against, traits.running_order) == (
        "an engine of mine 1.0",
        "nothing",
        "slot",
    )
    assert (traits.reserved_blocks, traits.rejects_oversized) == (2, True)
    assert not traits.frees_blocks_late


def test_a_subclass_of_a_built_in_policy_may_set_one_class_attribute() -> None:
    class Strict(VLLMV1):
        refuses: ClassVar[bool] = True

    assert traits_of(Strict()).rejects_oversized
    assert not traits_of(VLLMV1()).rejects_oversized
    assert traits_of(Strict()).engine == VLLMV1().traits.engine


def test_a_policy_of_0_1_follows_the_contract() -> None:
    for seed in range(4):
        check_policy(OldPolicy(), seed)


def test_reserved_blocks_are_not_in_the_pool() -> None:
    assert Server(OldPolicy(), 12, 4).pool.total == 10


def test_a_plan_is_read_and_replaced_as_in_0_1() -> None:
    request = Request("a", 0.0, 8, 4)
    plan = Plan(evict=[Eviction(request)], reject=[Rejection(request, "why")], decode=True)
    assert plan.evict == [Eviction(request, "recompute", "front")]
    assert plan.reject[0].reason == "why"
    assert (plan.admit, plan.swap_in, plan.waiting) == ((), (), None)
    held = plan._replace(hold=3, evict=())
    assert (held.hold, held.evict, held.reject, held.decode) == (3, (), plan.reject, True)
    assert plan == Plan(evict=[Eviction(request)], reject=[Rejection(request, "why")], decode=True)
    assert plan != held
    with pytest.raises(AttributeError, match="no attribute 'evictions'"):
        plan.evictions  # noqa: B018
    with pytest.raises(TypeError):
        Plan(evictions=())  # type: ignore[call-arg]
    tokens, blocks = list(Chunk(request, 8, 2))[1:]
    assert (tokens, blocks) == (8, 2)
    assert "hold=3" in repr(held) and "evict" not in repr(held)


@dataclass(frozen=True)
class OldStatePolicy(OldPolicy):
    """Uses the other names of 0.1: begin, leap, rank, ranked, memory, need, Eviction, wake, lasts."""

    pause: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "pause")
        one_of(self, order=("arrival",))

    def begin(self) -> Any:
        return 0

    def leap(self, memory: Any, iterations: int) -> Any:
        return memory + iterations

    def rank(self, request: Request) -> Any:
        return request.prompt

    @property
    def ranked(self) -> bool:
        return True

    def decide(self, view: View) -> Plan:
        if view.decoding and view.need > view.pool.free:
            victim = max((r for r in view.running if r.decodes), key=lambda r: (r.arrival, r.serial))
            return Plan(evict=[Eviction(victim, to="ranked")], decode=view.decoding > 1, memory=view.memory)
        plan = super().decide(view)
        if plan.chunks and view.now < view.waiting.oldest() + self.pause:
            return Plan(wake=just_after(view.waiting.oldest(), self.pause), memory=view.memory)
        if plan.chunks:
            return plan._replace(memory=view.memory)
        return plan._replace(memory=view.memory + plan.decode, lasts=not view.waiting)


def test_state_sorting_and_preemption_by_the_names_of_0_1() -> None:
    requests = [Request(id, id / 10, prompt, 9) for id, prompt in enumerate((9, 5, 7, 3, 8, 4))]
    log = serve(OldStatePolicy(batch=2), requests, blocks=60, block_size=4)
    assert log.stuck is None
    order = log.order()  # all wait 0.5 s, then pairs start with the shortest prompts first
    assert [set(order[:2]), set(order[2:4]), set(order[4:])] == [{3, 5}, {1, 2}, {0, 4}]
    assert log.server.view.state == log.server.view.memory > 0


def test_both_names_of_a_policy_method_are_one_method() -> None:
    old, new = OldStatePolicy(), VLLMV1()
    assert old.initial_state() == old.begin() == 0
    assert old.advance_state(2, 3) == old.leap(2, 3) == 5
    assert old.is_sorted and old.ranked
    assert new.begin() == new.initial_state() and new.paged == new.uses_block_pool
    assert new.but(max_num_seqs=3) == new.replace(max_num_seqs=3)
    assert settings(new)["max_num_seqs"] == 128


def test_a_request_is_made_and_read_by_the_names_of_0_1() -> None:
    request = Request("a", 0.0, 8, 4, after="b", delay=2.0, fails=3, prefix=(1, 2))
    assert (request.follows, request.think_time, request.fails_at_token, request.prefix_hashes) == ("b", 2.0, 3, (1, 2))
    assert (request.after, request.delay, request.fails, request.prefix) == ("b", 2.0, 3, (1, 2))
    assert request.generated == request.written == 0
    with pytest.raises(TypeError, match=r"Request\(\) got an unexpected keyword argument 'afterwards'"):
        Request("a", 0.0, 8, 4, afterwards="b")


def test_a_pool_and_a_preemption_are_read_by_the_names_of_0_1() -> None:
    pool = Server(VLLMV1(), 12, 4).pool
    assert (pool.size, pool.blocks(9)) == (pool.block_size, pool.blocks_for(9)) == (4, 3)
    preemption = Eviction(Request("a", 0.0, 8, 4), "swap", "swapped")
    assert (preemption.how, preemption.to) == (preemption.mode, preemption.queue) == ("swap", "swapped")

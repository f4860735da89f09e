"""vLLM v0: prompts first, a step of prompts only; decodes otherwise, the youngest preempted when memory runs short."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.core import FOREVER, Chunk, Eviction, Plan, Queue, Rejection, Request, Traits, View, at_least, one_of

from .common import REST
from .vllm_v0_common import Room, VLLMv0, by_priority

HOLD = Plan(decode=True, hold=FOREVER, spare=1)  # the block manager wants a free block for every decode
DECODE = HOLD._replace(lasts=True)


class Prompts(NamedTuple):
    """What the pass over the waiting requests came to."""

    chunks: Sequence[Chunk] = ()
    ignored: Sequence[Rejection] = ()
    memory: Any = None
    wake: Optional[float] = None


class Ranks(NamedTuple):
    """What the priority pass came to: the queues in order of priority, and who lost a place to the head."""

    running: list[Request]
    waiting: list[Request]
    victims: list[Request]
    inverted: bool  # a running request ranks behind the head of waiting


@dataclass(frozen=True)
class VLLM(VLLMv0):
    """vLLM v0's default scheduler; the defaults are 0.8.5's, other versions are presets."""

    max_num_batched_tokens: Optional[int] = None  # prompt tokens of one step; None: max_model_len, at least 2048
    padded_prefill: bool = False  # prompts of a step are padded to the longest, and counted so (0.3.3)
    max_paddings: Optional[int] = 256  # padding tokens of a step at most (with padded_prefill)
    ignored_step: bool = False  # a pass that only ignored prompts makes an empty step (<= 0.4.0)
    policy: str = "fcfs"  # fcfs, or priority (>= 0.6.2): a head that ranks first takes the place of the last

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "max_num_batched_tokens")
        at_least(self, 0, "max_paddings")
        one_of(self, policy=("fcfs", "priority"))

    @property
    def traits(self) -> Traits:
        return super().traits._replace(
            engine="vLLM v0, 0.3.3 to 0.9.2, without chunked prefill",
            validated_against="recordings of the real schedulers of 0.3.3, 0.4.0, 0.4.2, 0.5.0 and 0.8.5",
            running_order="arrival" if self.sort_running and self.policy == "fcfs" else "admission",
        )

    def decide(self, view: View) -> Plan:
        pool, plain = view.pool, self.delay_factor == 0 and self.policy == "fcfs"
        free = pool.free - view.need
        if plain and free > 0 and not view.waiting and not view.swapped:
            return DECODE if view.decoding else REST
        if not (view.waiting or view.running or view.swapped):
            return Plan(memory=view.memory)
        prompts = Prompts(memory=view.memory)
        if not view.swapped and (view.waiting or self.delay_factor > 0):
            prompts = self._prompts(view)
            if prompts.chunks or (prompts.ignored and self.ignored_step):
                return Plan(chunks=prompts.chunks, reject=prompts.ignored, memory=prompts.memory)
        if self.policy == "priority":
            return self._decode_by_priority(view, prompts)
        if view.decoding and free <= 0 and not (free == 0 and view.running[-1].cached % pool.size == 0):
            evict = self._grow_all(view, view.running, pool.free).evict
            return self._decode(prompts, evict=evict, decode=len(evict) < len(view.running))
        if view.swapped:
            return self._swap_in(view, prompts, free, view.running)
        if plain and not prompts.ignored:
            return HOLD if view.decoding else REST
        return self._decode(prompts, decode=view.decoding > 0, hold=0 if prompts.ignored else FOREVER)

    def budget(self, view: View) -> int:
        return self.max_num_batched_tokens or max(view.max_model_len or 0, 2048)

    def _prompts(self, view: View) -> Prompts:
        """Admit from the head of waiting, until something is short."""
        pool, free, budget, reserve = view.pool, view.pool.free, self.budget(view), self.reserve(view.pool)
        limit = budget if view.max_model_len is None else min(budget, view.max_model_len)
        seats = self.max_num_seqs - len(view.running)
        gate = self.gate(view)
        chunks: list[Chunk] = []
        ignored: list[Rejection] = []
        tokens = longest = 0
        for request in view.waiting:
            if gate is not None and not gate.passes(len(chunks) + len(ignored), len(chunks)):
                break
            length = request.length
            blocks = pool.blocks(length)
            if length > limit or pool.total - blocks < reserve:
                ignored.append(Rejection(request, self._too_long(length, limit, blocks, pool.total - reserve)))
                continue
            tokens, longest = tokens + length, max(longest, length)
            padded = (len(chunks) + 1) * longest
            if free - blocks < reserve or (padded if self.padded_prefill else tokens) > budget or len(chunks) >= seats:
                break
            if self.padded_prefill and self.max_paddings is not None and padded - tokens > self.max_paddings:
                break
            free -= blocks
            chunks.append(Chunk(request, length))
        if gate is None:
            return Prompts(chunks, ignored)
        started = chunks or (ignored and self.ignored_step)
        return Prompts(chunks, ignored, gate.scheduled() if started else gate.timers, gate.opens)

    def _too_long(self, length: int, limit: int, blocks: int, most: int) -> str:
        if length > limit:
            return f"{length} tokens to run at once, at most {limit} may (max_num_batched_tokens, max_model_len)"
        return f"{length} tokens need {blocks} blocks, at most {most} may be taken"

    def _grow_all(self, view: View, running: Queue, free: int) -> Room:
        """Let all grow in order, the last giving way."""
        room = Room(view, free)
        queue = deque(running)
        while queue:
            self.grow(room, queue.popleft(), queue)
        return room

    def _decode(self, prompts: Prompts, **moves: Any) -> Plan:
        return HOLD._replace(hold=0, reject=prompts.ignored, wake=prompts.wake, memory=prompts.memory)._replace(**moves)

    def _swap_in(self, view: View, prompts: Prompts, free: int, running: Queue) -> Plan:
        """Decode with the requests that can come back from the host, those last in the batch."""
        back, failed = self.swap_ins(view, free, self.max_num_seqs - len(running), self.budget(view) - len(running))
        plan = self._decode(prompts, swap_in=back, reject=[*prompts.ignored, *failed])
        if back and self.sort_running:
            return plan._replace(chunks=[Chunk(request, 1) for request in (*running, *back)], decode=False)
        return plan._replace(decode=bool(running or back), hold=0 if back or plan.moves.reject else FOREVER)

    def _decode_by_priority(self, view: View, prompts: Prompts) -> Plan:
        """Sort both queues, let the head of waiting preempt what it outranks, then decode as usual."""
        ranks = self._ranks(view, {rejection.request for rejection in prompts.ignored})
        if ranks.victims or view.pool.free <= view.need:
            free = view.pool.free + sum(request.blocks for request in ranks.victims)
            room = self._grow_all(view, ranks.running, free)
        else:
            room = Room(view, view.pool.free - view.need)
        evict = room.evict
        gone = {eviction.request for eviction in evict}
        running = [request for request in ranks.running if request not in gone]
        plan = self._decode(prompts, decode=bool(running))
        if not evict:
            plan = self._swap_in(view, prompts, room.free, running)
        waiting = [e.request for e in reversed(evict) if e.to == "front"] + ranks.waiting
        natural = [request for request in view.running if request not in gone and request not in ranks.victims]
        sort_running, sort_waiting = running != natural, bool(evict) or waiting != list(view.waiting)
        return plan._replace(
            evict=[*(Eviction(victim) for victim in ranks.victims), *evict],
            running=[*running, *plan.moves.swap_in] if sort_running else None,
            waiting=waiting if sort_waiting else None,
            hold=0 if ranks.inverted or sort_running or sort_waiting else plan.hold,
        )

    def _ranks(self, view: View, ignored: set[Request]) -> Ranks:
        pool, reserve = view.pool, self.reserve(view.pool)
        running = sorted(view.running, key=by_priority)
        waiting = [request for request in view.waiting if request not in ignored]
        victims: list[Request] = []
        inverted = False
        if waiting:
            head, free = waiting[0], pool.free
            blocks = pool.blocks(head.length)
            possible = pool.total - blocks >= reserve and head.length <= self.budget(view)
            while running and by_priority(running[-1]) > by_priority(head):
                inverted = True
                if possible and free - blocks >= reserve and len(running) < self.max_num_seqs:
                    break
                victims.append(running.pop())
                free += victims[-1].blocks
            waiting = sorted([head, *reversed(victims), *waiting[1:]], key=by_priority)
        gone = [request for request in view.waiting if request in ignored]
        return Ranks(running, [*waiting, *gone], victims, inverted)

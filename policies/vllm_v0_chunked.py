"""vLLM v0 with chunked prefill: one token budget a step, decodes and half-done prompts first, then new prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.core import FOREVER, Chunk, Plan, Rejection, Request, Traits, View, at_least, one_of

from .common import REST
from .delay_gate import DelayGate, Timers
from .vllm_v0 import DECODE
from .vllm_v0_common import Room, SwapIns, VLLMv0, ends_with


class Running(NamedTuple):
    """What the pass over the running requests came to."""

    chunks: list[Chunk]  # of half-done prompts
    left: Sequence[Request]  # not reached: the budget was gone
    decodes: Optional[Sequence[Request]]  # None for all
    scheduled: int
    tokens: int  # of the budget, left
    room: Room


class Prompts(NamedTuple):
    """What the pass over the waiting requests came to."""

    chunks: list[Chunk]
    ignored: list[Rejection]
    gate: Optional[DelayGate]


@dataclass(frozen=True)
class VLLMChunked(VLLMv0):
    """vLLM v0's scheduler with enable_chunked_prefill; the defaults are 0.8.5's, other versions are presets."""

    max_num_batched_tokens: int = 2048  # tokens of one step (768 in 0.4.1, 512 in 0.4.2-0.6.0)
    max_num_partial_prefills: int = 1  # prompts that share a step's budget evenly (>= 0.7)
    max_long_partial_prefills: int = 1  # long prompts among them (with several partial prefills)
    long_prefill_token_threshold: int = 0  # a longer prompt is long; 0: 4 % of max_model_len

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "max_num_batched_tokens", "max_num_partial_prefills", "max_long_partial_prefills")
        at_least(self, 0, "long_prefill_token_threshold")
        one_of(self, delay_scope=("queue", "request-unless-idle"))
        if self.max_num_partial_prefills > self.max_num_batched_tokens:
            most, given = self.max_num_batched_tokens, self.max_num_partial_prefills
            raise ValueError(f"max_num_partial_prefills: expected at most {most}, got {given!r}")

    @property
    def traits(self) -> Traits:
        return super().traits._replace(
            engine="vLLM v0, 0.4.1 to 0.9.2, with enable_chunked_prefill",
            validated_against=(
                "recordings of the real schedulers of 0.4.2 and 0.8.5; several partial prefills: not proven"
            ),
        )

    def begin(self) -> Any:
        return Timers() if self._delays else None

    @property
    def _delays(self) -> bool:
        # From 0.5.4 on the running queue is empty by the time the gate looks at it, so that it lets everybody pass.
        return self.delay_factor > 0 and self.delay_scope == "queue"

    def decide(self, view: View) -> Plan:
        if not (view.waiting or view.swapped or view.prefilling or self._delays):
            if view.pool.free > view.need and view.decoding <= self.max_num_batched_tokens:
                return DECODE if view.decoding else REST
        elif not (view.waiting or view.running or view.swapped):
            return Plan(memory=view.memory)
        slots = Slots(self, view) if self.max_num_partial_prefills > 1 else None
        run = self._running(view, self.max_num_batched_tokens if slots is None else slots.share)
        room, swaps = run.room, SwapIns()
        seats, tokens = self.max_num_seqs - run.scheduled, run.tokens
        if view.swapped and not room.evict:
            swaps = self.swap_ins(view, room.free, seats, tokens)
            seats -= len(swaps.back)
            for request in swaps.back:
                tokens -= request.pending
                room.free -= max(request.host, view.pool.blocks(request.length))
        prompts = self._prompts(view, room.free, seats, tokens, slots)
        return self._plan(view, run, swaps, prompts)

    def _running(self, view: View, share: int) -> Running:
        """Go on with decodes and half-done prompts alike, in order, as long as the budget lasts."""
        decoding, need = view.decoding, view.need
        tokens = self.max_num_batched_tokens - decoding
        if tokens < 0 or view.pool.free <= need or not ends_with(view.running, view.prefilling):
            return self._running_one_by_one(view, share)
        chunks: list[Chunk] = []
        left: list[Request] = []
        for request in view.prefilling:
            part = min(request.pending, tokens, share)
            if part and not left:
                chunks.append(Chunk(request, part))
                tokens -= part
            else:
                left.append(request)
        return Running(chunks, left, None, decoding + len(chunks), tokens, Room(view, view.pool.free - need))

    def _running_one_by_one(self, view: View, share: int) -> Running:
        room, tokens = Room(view), self.max_num_batched_tokens
        chunks: list[Chunk] = []
        decodes: list[Request] = []
        queue = deque(view.running)
        while queue and tokens:
            request = queue.popleft()
            part = min(request.pending, tokens, share)
            if not self.grow(room, request, queue):
                break
            tokens -= part
            if request.decodes:
                decodes.append(request)
            else:
                chunks.append(Chunk(request, part))
        return Running(chunks, list(queue), decodes, len(decodes) + len(chunks), tokens, room)

    def _prompts(self, view: View, free: int, seats: int, tokens: int, slots: Optional[Slots]) -> Prompts:
        """Admit from the head of waiting; the memory of a whole prompt is taken with its first part."""
        pool, reserve = view.pool, self.reserve(view.pool)
        gate = DelayGate(self.delay_factor, self.delay_scope, view, view.memory) if self._delays else None
        chunks: list[Chunk] = []
        ignored: list[Rejection] = []
        for request in view.waiting:
            if gate is not None and not gate.passes(len(chunks) + len(ignored), len(chunks)):
                break
            length = request.length
            if slots is not None and not slots.admits(length):
                continue
            part = min(length, tokens) if slots is None else min(length, tokens, slots.share)
            blocks = pool.blocks(length)
            if view.max_model_len is not None and part > view.max_model_len:
                ignored.append(Rejection(request, f"prompt of {length} tokens, max_model_len is {view.max_model_len}"))
                continue
            if pool.total - blocks < reserve:
                most = pool.total - reserve
                ignored.append(Rejection(request, f"{length} tokens need {blocks} blocks, at most {most} may be taken"))
                continue
            if free - blocks < reserve or not part or not seats:
                break
            free, seats, tokens = free - blocks, seats - 1, tokens - part
            chunks.append(Chunk(request, part, blocks))
            if slots is not None:
                slots.admitted(length)
        return Prompts(chunks, ignored, gate)

    def _plan(self, view: View, run: Running, swaps: SwapIns, prompts: Prompts) -> Plan:
        """Put the batch in order: new prompts, running ones, those from the host, decodes, decodes from the host."""
        evict, back, gate = run.room.evict, swaps.back, prompts.gate
        chunks = prompts.chunks + run.chunks if prompts.chunks else run.chunks
        if back:
            chunks = [*chunks, *(Chunk(request, request.pending) for request in back if not request.complete)]
        reject = [*prompts.ignored, *swaps.failed]
        memory = None if gate is None else gate.scheduled() if prompts.chunks else gate.timers
        wake = None if gate is None else gate.opens
        if not (evict or back or run.left or run.decodes is not None) and self._stays_in_order(view, prompts.chunks):
            hold = 0 if chunks or reject else FOREVER
            decode = view.decoding > 0
            return Plan(reject=reject, chunks=chunks, decode=decode, wake=wake, hold=hold, spare=1, memory=memory)
        decodes = [r for r in view.running if r.decodes] if run.decodes is None else run.decodes
        order = self._order(run, decodes, back, [chunk.request for chunk in prompts.chunks])
        batch = [*chunks, *(Chunk(r, 1) for r in decodes), *(Chunk(r, 1) for r in back if r.complete)]
        return Plan(evict=evict, swap_in=back, reject=reject, chunks=batch, running=order, wake=wake, memory=memory)

    def _stays_in_order(self, view: View, fresh: Sequence[Chunk]) -> bool:
        """Say whether the batch is still in order with the new prompts at its end."""
        if self.max_num_partial_prefills > 1 and view.prefilling:
            return False
        if not (self.sort_running and fresh):
            return True
        arrivals = [chunk.request.arrival for chunk in fresh]
        return (not view.running or view.running[-1].arrival < arrivals[0]) and arrivals == sorted(arrivals)

    def _order(
        self, run: Running, decodes: Sequence[Request], back: Sequence[Request], fresh: Sequence[Request]
    ) -> list[Request]:
        """Return the batch as the engine leaves it behind, half-done prompts that end now before the others."""
        back = [*(r for r in back if r.complete), *(r for r in back if not r.complete)]
        ending = [chunk.request for chunk in run.chunks if chunk.tokens == chunk.request.pending]
        others = [chunk.request for chunk in run.chunks if chunk.tokens < chunk.request.pending]
        if not self.sort_running:
            return [*run.left, *back, *decodes, *ending, *others, *fresh]
        prompts = [chunk.request for chunk in run.chunks]
        return sorted([*run.left, *fresh, *decodes, *prompts, *back], key=lambda request: request.arrival)


class Slots:
    """How several partial prefills share a step: an even part of the budget each, and few long ones at a time."""

    def __init__(self, policy: VLLMChunked, view: View) -> None:
        most, self.most_long = policy.max_num_partial_prefills, policy.max_long_partial_prefills
        self.threshold = policy.long_prefill_token_threshold or int(0.04 * (view.max_model_len or 0))
        self.long = sum(request.pending > self.threshold for request in view.prefilling)
        prompts, long = len(view.prefilling), self.long
        for request in view.waiting:
            if prompts >= most:
                break
            if request.length > self.threshold:
                if long >= self.most_long:
                    continue
                long += 1
            prompts += 1
        self.share = policy.max_num_batched_tokens // max(1, min(prompts, most))

    def admits(self, length: int) -> bool:
        """Say whether a prompt may join, long ones only while there are few."""
        return length <= self.threshold or self.long < self.most_long

    def admitted(self, length: int) -> None:
        """Note a prompt that joined."""
        self.long += length > self.threshold

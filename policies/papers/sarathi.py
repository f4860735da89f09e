"""Sarathi-Serve: decodes run in every step, and chunks of prompts fill the token budget. Also its simple baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, Optional

from servesim.core import NO_HOLD, Chunk, Float0, Hold, Int1, Plan, Policy, Preemption, Queue, Rejection, Request, View
from servesim.core.native import mypyc_attr

from .orca import reject_too_long, too_long
from .rules import PaperRules

CHUNK_MULTIPLE = 32  # chunk sizes of a schedule are rounded to a multiple of this
KEEP_ONE_FREE: Final = Hold(keep_free=1)
DECODE_PLAN: Final = Plan(decode=True, hold=Hold(keep_free=1, past_finish=True))
DECODE_THEN_PREFILL: Final = DECODE_PLAN._replace(state="prefill")  # for SarathiAlternating


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class Sarathi(Policy):
    """Stall-free batching: decodes, then partly computed prompts, then new ones, up to chunk_size tokens per step."""

    chunk_size: Int1 = 512  # tokens per step
    max_num_seqs: Int1 = 128  # maximum running requests
    watermark: Float0 = 0.01  # fraction of the blocks that an admission must leave free
    enable_dynamic_chunking_schedule: bool = False  # chunks get smaller from the start to the end of a prompt
    low_chunk_size: Optional[int] = None  # tokens per step in the last stage of a prompt (dynamic)
    high_chunk_size: Optional[int] = None  # tokens per step in the first stage of a prompt (dynamic)
    chunk_schedule_max_tokens: Optional[Int1] = None  # prompt tokens that all stages cover together (dynamic)
    chunk_schedule_stages: Optional[Int1] = None  # number of stages from high to low (dynamic)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enable_dynamic_chunking_schedule:
            for name in ("low_chunk_size", "high_chunk_size", "chunk_schedule_max_tokens", "chunk_schedule_stages"):
                value = getattr(self, name)
                if value is None:
                    raise ValueError(f"{name}: expected a number with enable_dynamic_chunking_schedule, got None")
                if name.endswith("chunk_size") and (value < CHUNK_MULTIPLE or value % CHUNK_MULTIPLE):
                    raise ValueError(f"{name}: expected a multiple of {CHUNK_MULTIPLE}, got {value!r}")

    def rules(self) -> PaperRules:
        return PaperRules(
            "Sarathi-Serve 96f9911",
            "recordings of Sarathi-Serve's sarathi scheduler, step by step",
            running_order="arrival",
        )

    def decide(self, view: View) -> Plan:
        if not (view.waiting or view.prefilling) and view.decoding and view.decode_block_need < view.pool.free:
            return DECODE_PLAN
        decodes = schedule_decodes(view)
        chunks = self._continue_prompts(decodes.prompts, decodes.decoding)
        reject: list[Rejection] = []
        if view.waiting or decodes.victims:
            tokens = decodes.decoding + sum(chunk.tokens for chunk in chunks)
            admitted, reject = self._admit(view, decodes, tokens)
            chunks += admitted
        can_hold = not (chunks or reject or decodes.victims or decodes.pool_empty)
        return Plan(
            preempt=[Preemption(victim) for victim in decodes.victims],
            reject=reject,
            chunks=chunks,
            decode=decodes.decoding > 0,
            hold=KEEP_ONE_FREE if can_hold else NO_HOLD,
        )

    def _continue_prompts(self, prompts: Queue, tokens: int) -> list[Chunk]:
        """Return chunks of partly computed prompts for a step that already has `tokens` tokens."""
        chunks: list[Chunk] = []
        for request in prompts:
            size = self._chunk_tokens(request, tokens)
            if size > 0:
                chunks.append(Chunk(request, size))
                tokens += size
        return chunks

    def _admit(self, view: View, decodes: DecodeResult, tokens: int) -> tuple[list[Chunk], list[Rejection]]:
        """Admit from the head of waiting. The step already has `tokens` tokens."""
        chunks: list[Chunk] = []
        reject: list[Rejection] = []
        free = decodes.free - int(self.watermark * view.pool.total)
        max_admitted = self.max_num_seqs - len(view.running) + len(decodes.victims)
        for request in self._waiting_with_victims(view, decodes.victims):
            if too_long(request, view):
                reject.append(reject_too_long(request, view))
                continue
            blocks = view.pool.blocks_for(request.length)
            if blocks > free or len(chunks) >= max_admitted:
                break
            # A victim of this step still counts its computed tokens here. If its prompt was complete, there is no chunk
            # to run, and admission ends. Otherwise it is admitted for the rest of its tokens.
            size = 0 if request.decodes else self._chunk_tokens(request, tokens)
            if size <= 0:
                break
            chunks.append(Chunk(request, size, blocks))
            tokens += size
            free -= blocks
        return chunks, reject

    def _waiting_with_victims(self, view: View, victims: Sequence[Request]) -> Iterable[Request]:
        """Return the victims and the waiting queue. If the queue is sorted, a step with victims admits no request."""
        if not victims:
            return view.waiting
        return () if self.is_sorted else (*reversed(victims), *view.waiting)

    def _chunk_tokens(self, request: Request, tokens: int) -> int:
        """Return the tokens of a prompt that fit into a step that already has `tokens` tokens."""
        size = self.chunk_size
        if self.enable_dynamic_chunking_schedule:
            stage = request.cached // -(-(self.chunk_schedule_max_tokens or 1) // (self.chunk_schedule_stages or 1))
            size = self._chunk_sizes[min(stage, len(self._chunk_sizes) - 1)]
        return min(request.pending, size - tokens)

    @cached_property
    def _chunk_sizes(self) -> list[int]:
        """Chunk sizes by stage: from high to low in equal steps, rounded."""
        low, high, stages = self.low_chunk_size or 0, self.high_chunk_size or 0, self.chunk_schedule_stages or 1
        steps = [low + (high - low) * stage // (stages - 1) for stage in range(stages)] if stages > 1 else [low]
        return [round(size / CHUNK_MULTIPLE) * CHUNK_MULTIPLE for size in reversed(steps)]


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class SarathiAlternating(Sarathi):
    """Chunked prefill without mixed steps: prefill steps and decode steps alternate."""

    def rules(self) -> PaperRules:
        return PaperRules(
            "Sarathi-Serve 96f9911's simple_chunking baseline",
            "hand-worked cases; shares its code with sarathi, which is validated against recordings",
            running_order="arrival",
        )

    def initial_state(self) -> Any:
        return "prefill"  # kind of the next step

    def decide(self, view: View) -> Plan:
        if view.state == "prefill" and (view.waiting or view.prefilling):
            chunks, reject = self._schedule_prompts(view)
            if chunks or reject:
                return Plan(chunks=chunks, reject=reject, state="decode")
        if view.state == "prefill" and not view.waiting and view.decoding and view.decode_block_need < view.pool.free:
            return DECODE_THEN_PREFILL
        decodes = schedule_decodes(view)
        can_hold = view.state == "prefill" and not (decodes.victims or decodes.pool_empty)
        return Plan(
            preempt=[Preemption(victim) for victim in decodes.victims],
            decode=decodes.decoding > 0,
            hold=KEEP_ONE_FREE if can_hold else NO_HOLD,
            state="prefill",
        )

    def _schedule_prompts(self, view: View) -> tuple[list[Chunk], list[Rejection]]:
        """Continue partly computed prompts. Only if there is none, start new ones."""
        chunks = self._continue_prompts(view.prefilling, 0)
        if chunks or not view.waiting:
            return chunks, []
        return self._admit(view, DecodeResult(0, view.pool.free, (), (), False), 0)


class DecodeResult(NamedTuple):
    """The running requests that decode in this step, and those that it preempts."""

    decoding: int  # number of requests that decode
    free: int  # free blocks after their next token
    prompts: Queue  # running requests whose prompt is not complete
    victims: Sequence[Request]  # in the order of preemption
    pool_empty: bool  # no block is left, so the plan cannot be held


def schedule_decodes(view: View) -> DecodeResult:
    """Schedule the next token of every decoding request. If no block is free, preempt the newest request.

    As in vLLM, a request needs a free block even if it does not use it.
    """
    free = view.pool.free - view.decode_block_need
    if free > 0 or not view.decoding:
        return DecodeResult(view.decoding, free, view.prefilling, (), False)
    queue = list(view.running)
    free, visited, tail = view.pool.free, 0, len(queue)
    prompts: list[Request] = []
    victims: list[Request] = []
    count = 0
    while visited < tail:
        request = queue[visited]
        visited += 1
        if not request.decodes:
            prompts.append(request)
            continue
        while free <= 0 and visited < tail:
            tail -= 1
            victims.append(queue[tail])
            free += queue[tail].blocks
        if free <= 0:  # no other request is left
            victims.append(request)
            free += request.blocks
            break
        free -= view.pool.blocks_for(request.cached + 1) - request.blocks
        count += 1
    return DecodeResult(count, free, prompts, victims, True)

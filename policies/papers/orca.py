"""Engines that reserve all blocks of a request on admission: Orca, with mixed steps, and static batches.

A static batch starts when the previous one is done, and runs until its longest request finishes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Literal, Optional

from servesim.core import (
    DECODE_PAST_FINISH,
    DECODE_UNTIL_FINISH,
    IDLE_PLAN,
    NO_HOLD,
    PAST_FINISH,
    UNTIL_FINISH,
    BadInput,
    Chunk,
    Float0,
    Hold,
    Int1,
    Plan,
    Policy,
    Rejection,
    Request,
    View,
)
from servesim.core.native import mypyc_attr

from .rules import PaperRules


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class Orca(Policy):
    """Iteration-level scheduling with reserved blocks: first come, first served, no preemption."""

    max_num_seqs: Int1 = 128  # requests per step (max_bs in the paper)
    n_slots: Optional[Int1] = None  # maximum reserved tokens of the KV cache; null: the whole pool
    # reserved tokens: request (its prompt + limit) or model (max_model_len, as in Sarathi)
    reserve: Literal["request", "model"] = "request"

    def rules(self) -> PaperRules:
        return PaperRules(
            "Orca (OSDI 2022, Algorithm 1); with reserve: model, Sarathi-Serve 96f9911's baseline",
            "hand-worked cases from the paper; with reserve: model, metrics of the real baseline",
            running_order="arrival",
        )

    def decide(self, view: View) -> Plan:
        if not view.waiting:
            return DECODE_PAST_FINISH if view.decoding else IDLE_PLAN
        # Sarathi-Serve drops a long prompt at the head of waiting before it counts the running requests.
        drops = self.reserve == "model" and too_long(view.waiting[0], view)
        if len(view.running) >= self.max_num_seqs and not drops:
            return DECODE_UNTIL_FINISH
        pool = view.pool
        free = pool.free
        if self.n_slots is not None:
            free = min(free, self.n_slots // pool.block_size - (pool.total - pool.free))
        chunks, reject = admit_reserved(view, free, self.max_num_seqs - len(view.running), self._blocks_to_reserve)
        # The paper sorts the batch by arrival, so running requests come first. Sarathi-Serve puts prompts first.
        decode = "first" if self.reserve == "request" else True
        hold = NO_HOLD if chunks or reject else UNTIL_FINISH
        return Plan(chunks=chunks, reject=reject, decode=view.decoding > 0 and decode, hold=hold)

    def _blocks_to_reserve(self, request: Request, view: View) -> int:
        if self.reserve == "model":
            return slot_blocks(request, view)
        max_length = request.prompt + request.limit
        return view.pool.blocks_for(max_length if view.max_model_len is None else min(max_length, view.max_model_len))


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class Static(Policy):
    """FasterTransformer: all requests of a batch start together. No request joins a running batch."""

    max_num_seqs: Int1 = 128  # requests per batch
    pad_finished: bool = False  # finished requests stay as padding rows until the batch is done
    batch_waiting_time: Float0 = 0.0  # maximum seconds that the oldest request waits for a full batch

    def rules(self) -> PaperRules:
        return PaperRules(
            "FasterTransformer's batching, as implemented in Sarathi-Serve 96f9911",
            "recordings of Sarathi-Serve's faster_transformer scheduler, step by step",
        )

    def initial_state(self) -> Any:
        return 0  # number of requests that the running batch had at its start

    def decide(self, view: View) -> Plan:
        if view.running:
            padding = view.state - len(view.running) if self.pad_finished else 0
            hold = UNTIL_FINISH if self.pad_finished else PAST_FINISH
            return Plan(decode=True, padding_rows=padding, hold=hold, state=view.state)
        if not view.waiting:
            return Plan(state=view.state)
        if self.batch_waiting_time and len(view.waiting) < self.max_num_seqs:
            deadline = view.waiting.oldest() + self.batch_waiting_time
            if view.now < deadline:
                return Plan(hold=Hold(0, until=deadline), state=view.state)
        chunks, reject = admit_reserved(view, view.pool.free, self.max_num_seqs, slot_blocks)
        return Plan(chunks=chunks, reject=reject, state=len(chunks))


def slot_blocks(request: Request, view: View) -> int:
    """Return the blocks that an engine without PagedAttention reserves per request: max_model_len tokens.

    Without max_model_len, it is prompt length + output limit of the request.
    """
    max_length = view.max_model_len
    blocks = view.pool.blocks_for(request.prompt + request.limit if max_length is None else max_length)
    if blocks > view.pool.total:
        raise BadInput(f"engine.num_blocks: expected at least {blocks} (blocks of one request), got {view.pool.total}")
    return blocks


def too_long(request: Request, view: View) -> bool:
    """Return whether a request is longer than max_model_len.

    With `rejects_oversized`, the server has already rejected it on arrival.
    """
    return view.max_model_len is not None and request.length > view.max_model_len


def reject_too_long(request: Request, view: View) -> Rejection:
    """Return the rejection of a request that is longer than max_model_len."""
    return Rejection(request, f"longer than max_model_len {view.max_model_len}")


def admit_reserved(
    view: View, free: int, max_admitted: int, blocks_to_reserve: Callable[[Request, View], int]
) -> tuple[list[Chunk], list[Rejection]]:
    """Admit whole prompts from the head of waiting. Each request gets all blocks that it can ever need."""
    chunks: list[Chunk] = []
    reject: list[Rejection] = []
    for request in view.waiting:
        if too_long(request, view):
            reject.append(reject_too_long(request, view))
            continue
        blocks = blocks_to_reserve(request, view)
        if blocks > free or len(chunks) == max_admitted:
            break
        free -= blocks
        chunks.append(Chunk(request, request.pending, blocks))
    return chunks, reject

"""Orca: mixed steps of prefills and decodes. Admission reserves all blocks that a request can need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from servesim.core import FOREVER, Plan, Policy, Request, Traits, View, require_at_least, require_one_of
from servesim.core.native import mypyc_attr

from .common import DECODE_PAST_FINISH, DECODE_UNTIL_FINISH, IDLE_PLAN, admit_reserved, too_long
from .static import slot_blocks


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class Orca(Policy):
    """Iteration-level scheduling with reserved blocks: first come, first served, no preemption."""

    max_num_seqs: int = 128  # requests per step (max_bs in the paper)
    n_slots: Optional[int] = None  # maximum reserved tokens of the KV cache; null: the whole pool
    reserve: str = "request"  # reserved tokens: request (its prompt + limit) or model (max_model_len, as in Sarathi)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 1, "max_num_seqs", "n_slots")
        require_one_of(self, reserve=("request", "model"))

    @property
    def traits(self) -> Traits:
        return Traits(
            engine="Orca (OSDI 2022, Algorithm 1); with reserve: model, Sarathi-Serve 96f9911's baseline",
            validated_against="hand-worked cases from the paper; with reserve: model, metrics of the real baseline",
            running_order="arrival",
            rejects_oversized=False,  # the scheduler itself decides about such requests, as in the real engine
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
        decode_first = self.reserve == "request"
        hold = 0 if chunks or reject else FOREVER
        return Plan(chunks=chunks, reject=reject, decode=view.decoding > 0, decode_first=decode_first, hold=hold)

    def _blocks_to_reserve(self, request: Request, view: View) -> int:
        if self.reserve == "model":
            return slot_blocks(request, view)
        max_length = request.prompt + request.limit
        return view.pool.blocks_for(max_length if view.max_model_len is None else min(max_length, view.max_model_len))

"""Orca: prompts and decodes share every iteration, and whoever enters is promised memory to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from servesim.core import FOREVER, Plan, Policy, Request, Traits, View, at_least, one_of

from .common import DECODE, HOLD, REST, admit_reserved
from .static import slot_blocks


@dataclass(frozen=True)
class Orca(Policy):
    """Iteration-level scheduling with reservations: first come, first served, no bypass, never a preemption."""

    max_num_seqs: int = 128  # requests of an iteration (the paper's max_bs)
    n_slots: Optional[int] = None  # tokens of keys and values that may be promised, None for the whole pool
    reserve: str = "request"  # promised to a request: request (its prompt + limit), model (max_model_len, as Sarathi)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "max_num_seqs", "n_slots")
        one_of(self, reserve=("request", "model"))

    @property
    def traits(self) -> Traits:
        return Traits(
            engine="Orca (OSDI 2022, Algorithm 1); with reserve: model, Sarathi-Serve 96f9911's baseline",
            validated_against=(
                "the paper's rule by hand-worked cases; reserve: model by the figures of the real baseline"
            ),
            running_order="arrival",
            rejects_oversized=False,  # the real one drops or blocks by its own rules
        )

    def decide(self, view: View) -> Plan:
        if not view.waiting:
            return DECODE if view.decoding else REST
        if len(view.running) >= self.max_num_seqs:
            return HOLD
        pool = view.pool
        room = pool.free
        if self.n_slots is not None:
            room = min(room, self.n_slots // pool.size - (pool.total - pool.free))
        chunks, reject = admit_reserved(view, room, self.max_num_seqs - len(view.running), self._reservation)
        # The paper selects in order of arrival, so who runs stands first; Sarathi puts prompts first.
        first = self.reserve == "request"
        hold = 0 if chunks or reject else FOREVER
        return Plan(chunks=chunks, reject=reject, decode=view.decoding > 0, decode_first=first, hold=hold)

    def _reservation(self, request: Request, view: View) -> int:
        if self.reserve == "model":
            return slot_blocks(request, view)
        longest = request.prompt + request.limit
        return view.pool.blocks(longest if view.max_model_len is None else min(longest, view.max_model_len))

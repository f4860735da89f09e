"""Static batching: a batch is formed when the last one is over, and runs until its longest answer ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from servesim.core import FOREVER, BadInput, Plan, Policy, Request, Traits, View, at_least

from .common import admit_reserved


@dataclass(frozen=True)
class Static(Policy):
    """FasterTransformer's rule: all of a batch start together, nobody joins before the last of them has ended."""

    max_num_seqs: int = 128  # requests of a batch
    pad_finished: bool = False  # finished requests keep their rows in the step's cost until the batch is over
    batch_waiting_time: float = 0.0  # seconds the oldest waits for the batch to fill up before it starts anyway

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "max_num_seqs")
        at_least(self, 0, "batch_waiting_time")

    @property
    def traits(self) -> Traits:
        return Traits(
            engine="FasterTransformer's batching, as Sarathi-Serve 96f9911 carries it",
            validated_against="recordings of Sarathi-Serve's faster_transformer scheduler, turn by turn",
            rejects_oversized=False,  # the real one drops or blocks by its own rules
        )

    def begin(self) -> Any:
        return 0  # requests the running batch began with

    def decide(self, view: View) -> Plan:
        if view.running:
            padding = view.memory - len(view.running) if self.pad_finished else 0
            lasts = not self.pad_finished
            return Plan(decode=True, padding=padding, hold=FOREVER, lasts=lasts, memory=view.memory)
        if not view.waiting:
            return Plan(memory=view.memory)
        if self.batch_waiting_time and len(view.waiting) < self.max_num_seqs:
            start = view.waiting.oldest() + self.batch_waiting_time
            if view.now < start:
                return Plan(wake=start, memory=view.memory)
        chunks, reject = admit_reserved(view, view.pool.free, self.max_num_seqs, slot_blocks)
        return Plan(chunks=chunks, reject=reject, memory=len(chunks))


def slot_blocks(request: Request, view: View) -> int:
    """Return what engines before paging set aside for a request: room for the longest answer the model can give.

    Where no max_model_len is known, the longest that this request may become stands for it.
    """
    longest = view.max_model_len
    slot = view.pool.blocks(request.prompt + request.limit if longest is None else longest)
    if slot > view.pool.total:
        raise BadInput(f"engine.num_blocks: expected at least {slot}, one slot, got {view.pool.total}")
    return slot

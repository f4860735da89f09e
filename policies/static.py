"""Static batching: a batch starts when the previous one is done, and runs until its longest request finishes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from servesim.core import FOREVER, BadInput, Plan, Policy, Request, Traits, View, require_at_least
from servesim.core.native import mypyc_attr

from .common import admit_reserved


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class Static(Policy):
    """FasterTransformer: all requests of a batch start together. No request joins a running batch."""

    max_num_seqs: int = 128  # requests per batch
    pad_finished: bool = False  # finished requests stay as padding rows until the batch is done
    batch_waiting_time: float = 0.0  # maximum seconds that the oldest request waits for a full batch

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 1, "max_num_seqs")
        require_at_least(self, 0, "batch_waiting_time")

    @property
    def traits(self) -> Traits:
        return Traits(
            engine="FasterTransformer's batching, as implemented in Sarathi-Serve 96f9911",
            validated_against="recordings of Sarathi-Serve's faster_transformer scheduler, step by step",
            rejects_oversized=False,  # the scheduler itself decides about such requests, as in the real engine
        )

    def initial_state(self) -> Any:
        return 0  # number of requests that the running batch had at its start

    def decide(self, view: View) -> Plan:
        if view.running:
            padding = view.state - len(view.running) if self.pad_finished else 0
            past_finish = not self.pad_finished
            return Plan(decode=True, padding_rows=padding, hold=FOREVER, hold_past_finish=past_finish, state=view.state)
        if not view.waiting:
            return Plan(state=view.state)
        if self.batch_waiting_time and len(view.waiting) < self.max_num_seqs:
            deadline = view.waiting.oldest() + self.batch_waiting_time
            if view.now < deadline:
                return Plan(wake_at=deadline, state=view.state)
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

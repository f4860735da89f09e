"""Sarathi-Serve: decodes always run, chunks of prompts fill up the token budget; and its alternating baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Optional

from servesim.core import FOREVER, Chunk, Eviction, Plan, Policy, Queue, Rejection, Request, Traits, View, at_least

from .common import refusal, too_long

ROUNDING = 32  # tokens that chunk sizes of a schedule are rounded to
DECODE = Plan(decode=True, hold=FOREVER, spare=1, lasts=True)
TURN = DECODE._replace(memory="prefill")


@dataclass(frozen=True)
class Sarathi(Policy):
    """Stall-free batching: decodes, then prompts already begun, then new ones, within chunk_size tokens a step."""

    chunk_size: int = 512  # tokens of a step
    max_num_seqs: int = 128  # requests that run at once
    watermark: float = 0.01  # share of the blocks that an admission must leave free
    enable_dynamic_chunking_schedule: bool = False  # chunk sizes that shrink as a prompt goes on
    low_chunk_size: Optional[int] = None  # tokens of a step for a prompt in its last stage (dynamic)
    high_chunk_size: Optional[int] = None  # tokens of a step for a prompt in its first stage (dynamic)
    chunk_schedule_max_tokens: Optional[int] = None  # prompt tokens over which the stages spread (dynamic)
    chunk_schedule_stages: Optional[int] = None  # stages from high to low (dynamic)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "chunk_size", "max_num_seqs", "chunk_schedule_max_tokens", "chunk_schedule_stages")
        at_least(self, 0, "watermark")
        if self.enable_dynamic_chunking_schedule:
            for name in ("low_chunk_size", "high_chunk_size", "chunk_schedule_max_tokens", "chunk_schedule_stages"):
                value = getattr(self, name)
                if value is None:
                    raise ValueError(f"{name}: expected a number with enable_dynamic_chunking_schedule, got None")
                if name.endswith("chunk_size") and (value < ROUNDING or value % ROUNDING):
                    raise ValueError(f"{name}: expected a multiple of {ROUNDING}, got {value!r}")

    @property
    def traits(self) -> Traits:
        return Traits(
            engine="Sarathi-Serve 96f9911",
            validated_against="recordings of Sarathi-Serve's sarathi scheduler, turn by turn",
            running_order="arrival",
            rejects_oversized=False,  # the real one drops or blocks by its own rules
        )

    def decide(self, view: View) -> Plan:
        if not (view.waiting or view.prefilling) and view.decoding and view.need < view.pool.free:
            return DECODE
        decodes = keep_decoding(view)
        chunks = self._begun(decodes.prompts, decodes.decoding)
        reject: list[Rejection] = []
        if view.waiting or decodes.victims:
            tokens = decodes.decoding + sum(chunk.tokens for chunk in chunks)
            admitted, reject = self._admissions(view, decodes, tokens)
            chunks += admitted
        held = not (chunks or reject or decodes.victims or decodes.tight)
        return Plan(
            evict=[Eviction(victim) for victim in decodes.victims],
            reject=reject,
            chunks=chunks,
            decode=decodes.decoding > 0,
            hold=FOREVER if held else 0,
            spare=1,
        )

    def _begun(self, prompts: Queue, tokens: int) -> list[Chunk]:
        """Go on with half-done prompts beside the tokens that a step already has."""
        chunks: list[Chunk] = []
        for request in prompts:
            size = self._chunk(request, tokens)
            if size > 0:
                chunks.append(Chunk(request, size))
                tokens += size
        return chunks

    def _admissions(self, view: View, decodes: Decodes, tokens: int) -> tuple[list[Chunk], list[Rejection]]:
        chunks: list[Chunk] = []
        reject: list[Rejection] = []
        free = decodes.free - int(self.watermark * view.pool.total)
        places = self.max_num_seqs - len(view.running) + len(decodes.victims)
        for request in self._heads(view, decodes.victims):
            if too_long(request, view):
                reject.append(refusal(request, view))
                continue
            blocks = view.pool.blocks(request.length)
            if blocks > free or len(chunks) >= places:
                break
            # A victim of this very step is still in the books as far as it had come: one that decoded has nothing
            # left to compute and shuts the door, one that was half-way is let in for the rest of its prompt.
            size = 0 if request.decodes else self._chunk(request, tokens)
            if size <= 0:
                break
            chunks.append(Chunk(request, size, blocks))
            tokens += size
            free -= blocks
        return chunks, reject

    def _heads(self, view: View, victims: Sequence[Request]) -> Iterable[Request]:
        """Return waiting as it stands once the victims are back at its front."""
        if not victims:
            return view.waiting
        return () if self.ranked else (*reversed(victims), *view.waiting)

    def _chunk(self, request: Request, tokens: int) -> int:
        """Return how much of a prompt fits beside the tokens that a step already has."""
        size = self.chunk_size
        if self.enable_dynamic_chunking_schedule:
            stage = request.cached // -(-(self.chunk_schedule_max_tokens or 1) // (self.chunk_schedule_stages or 1))
            size = self._sizes[min(stage, len(self._sizes) - 1)]
        return min(request.pending, size - tokens)

    @cached_property
    def _sizes(self) -> list[int]:
        """Chunk sizes by stage: evenly from high to low, rounded."""
        low, high, stages = self.low_chunk_size or 0, self.high_chunk_size or 0, self.chunk_schedule_stages or 1
        steps = [low + (high - low) * stage // (stages - 1) for stage in range(stages)] if stages > 1 else [low]
        return [round(size / ROUNDING) * ROUNDING for size in reversed(steps)]


@dataclass(frozen=True)
class SarathiAlternating(Sarathi):
    """Chunked prompts that do not share steps with decodes: prompt-only and decode-only steps take turns."""

    @property
    def traits(self) -> Traits:
        return super().traits._replace(
            engine="Sarathi-Serve 96f9911's simple_chunking baseline",
            validated_against="hand-worked cases; shares its passes with sarathi, which is proven on recordings",
        )

    def begin(self) -> Any:
        return "prefill"  # whose turn it is

    def decide(self, view: View) -> Plan:
        if view.memory == "prefill" and (view.waiting or view.prefilling):
            chunks, reject = self._prompts(view)
            if chunks or reject:
                return Plan(chunks=chunks, reject=reject, memory="decode")
        if view.memory == "prefill" and not view.waiting and view.decoding and view.need < view.pool.free:
            return TURN
        decodes = keep_decoding(view)
        held = view.memory == "prefill" and not (decodes.victims or decodes.tight)
        return Plan(
            evict=[Eviction(victim) for victim in decodes.victims],
            decode=decodes.decoding > 0,
            hold=FOREVER if held else 0,
            spare=1,
            memory="prefill",
        )

    def _prompts(self, view: View) -> tuple[list[Chunk], list[Rejection]]:
        """Prompts already begun go on; only when there is none do new ones start."""
        chunks = self._begun(view.prefilling, 0)
        if chunks or not view.waiting:
            return chunks, []
        return self._admissions(view, Decodes(0, view.pool.free, (), (), False), 0)


class Decodes(NamedTuple):
    """What the running requests come to: who decodes, who had to go for it, and what is left."""

    decoding: int  # requests that decode
    free: int  # blocks left after their next token
    prompts: Queue  # running requests with a prompt to finish
    victims: Sequence[Request]  # in the order they were taken
    tight: bool  # the last block is gone, so the next step has to look again


def keep_decoding(view: View) -> Decodes:
    """Give every decoding request its next token, the youngest making room when no block is free.

    A request needs a free block to go on even if it would not take it, as in vLLM.
    """
    free = view.pool.free - view.need
    if free > 0 or not view.decoding:
        return Decodes(view.decoding, free, view.prefilling, (), False)
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
        if free <= 0:  # nobody else is left to go
            victims.append(request)
            free += request.blocks
            break
        free -= view.pool.blocks(request.cached + 1) - request.blocks
        count += 1
    return Decodes(count, free, prompts, victims, True)

"""DeepSpeed-FastGen's Dynamic SplitFuse as MII runs it: decodes first, prompts cut to fill the batch exactly.

Finished requests keep their blocks until MII's loop comes round to flushing them: the flush is asked for after the
next decision and carried out with the one after that. The policy's memory is how many flushes have been asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from servesim.core import FOREVER, Chunk, Eviction, Plan, Policy, Request, Stuck, Traits, View, at_least


@dataclass(frozen=True)
class SplitFuse(Policy):
    """Token generation before prompts, stalling instead of preempting; eviction only when nothing at all can run."""

    max_ragged_batch_size: int = 768  # tokens of a forward pass
    max_ragged_sequence_count: int = 512  # requests of a forward pass
    max_tracked_sequences: int = 2048  # requests with keys and values, those not yet flushed included
    mend_flush: bool = False  # when nothing can run, wait for a flush under way; MII evicts, or dies if nobody is left

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "max_ragged_batch_size", "max_ragged_sequence_count", "max_tracked_sequences")

    @property
    def traits(self) -> Traits:
        return Traits(
            engine="DeepSpeed-MII 8abdd98 (FastGen)",
            validated_against="recordings of MII's RaggedBatchBase, turn by turn",
            rejects_oversized=False,  # the real one drops or blocks by its own rules
            frees_blocks_late=True,
        )

    def begin(self) -> Any:
        return 0  # finished requests whose flush has been asked for

    def decide(self, view: View) -> Plan:
        release = list(islice(view.finished, view.memory)) if view.memory else ()
        asked = len(view.finished) - len(release)
        count = view.decoding
        if count <= min(self.max_ragged_sequence_count, self.max_ragged_batch_size) and view.need <= view.pool.free:
            chunks = self._prompts(view, count, view.need) if view.waiting or view.prefilling else ()
            if count or chunks or release:
                hold = FOREVER if not (chunks or release or asked) else 0
                decode = count > 0
                return Plan(release=release, chunks=chunks, decode=decode, decode_first=True, hold=hold, memory=asked)
        else:
            scheduled, stalled, promised = self._decodes(view)
            chunks = self._prompts(view, len(scheduled), promised)
            if scheduled or chunks or release:
                running = None
                if stalled:  # MII's buffer keeps who sat out ahead of those that come back from the pass
                    started = [chunk.request for chunk in chunks if chunk.request.place != "running"]
                    running = [*stalled, *scheduled, *view.prefilling, *started]
                batch = [*(Chunk(request, 1) for request in scheduled), *chunks]
                return Plan(release=release, chunks=batch, running=running, memory=asked)
        if (self.mend_flush and asked) or not (view.waiting or view.running):
            return Plan(memory=asked)
        return Plan(evict=[Eviction(self._victim(view), "recompute", "back")], memory=asked)

    def _decodes(self, view: View) -> tuple[list[Request], list[Request], int]:
        """Return who generates a token, who has to sit out, and the blocks that this takes."""
        scheduled: list[Request] = []
        stalled: list[Request] = []
        taken = seen = 0
        places = min(self.max_ragged_sequence_count, self.max_ragged_batch_size)
        for request in view.running:
            if not request.decodes:
                continue
            seen += 1
            block = view.pool.blocks(request.cached + 1) - request.blocks
            if seen > places or taken + block > view.pool.free:
                stalled.append(request)
            else:
                taken += block
                scheduled.append(request)
        return scheduled, stalled, taken

    def _prompts(self, view: View, count: int, promised: int) -> list[Chunk]:
        """Cut prompts to fill the batch; one whose rest does not fit into memory stops those behind it."""
        chunks: list[Chunk] = []
        pool, left = view.pool, self.max_ragged_batch_size - count
        full = len(view.running) + len(view.finished) >= self.max_tracked_sequences
        for request in chain(view.prefilling, view.waiting):
            if not pool.free or count >= self.max_ragged_sequence_count or left <= 0:
                break
            rest = request.pending
            blocked = full and request.place == "waiting"
            if blocked or pool.blocks(request.length) - request.blocks > pool.free - promised:
                if rest > 1:
                    break
                continue  # MII tests for room before the cut, and a single token is not cut
            tokens = min(rest, left)
            chunks.append(Chunk(request, tokens))
            promised += pool.blocks(request.cached + tokens) - request.blocks
            left -= tokens
            count += 1
        return chunks

    def _victim(self, view: View) -> Request:
        """Return the last of the buffer that holds keys and values; a prompt in parts stands at its very front."""
        for request in reversed(view.running):
            if request.decodes:
                return request
        if view.prefilling:
            return view.prefilling[-1]
        why = "MII asserts: nothing can be scheduled and only finished requests hold memory, not yet flushed"
        raise Stuck(why, list(view.waiting), view.now)

"""Dynamic SplitFuse of DeepSpeed-FastGen (MII): decodes first, chunks of prompts fill the rest of the batch.

MII frees ("flushes") the blocks of finished requests late: it requests the flush after the next decision and carries it
out with the decision after that. The policy state is the number of requested flushes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from servesim.core import NO_HOLD, UNTIL_FINISH, Chunk, Int1, Plan, Policy, Preemption, Reorder, Request, Stuck, View
from servesim.core.native import mypyc_attr

from .rules import SplitFuseRules


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class SplitFuse(Policy):
    """Decodes before prompts. A request without free blocks skips the step. Preemption only if no request can run."""

    max_ragged_batch_size: Int1 = 768  # tokens per model call
    max_ragged_sequence_count: Int1 = 512  # requests per model call
    max_tracked_sequences: Int1 = 2048  # requests with KV blocks, including finished requests that are not flushed
    wait_for_flush: bool = False  # if no request can run, wait for a requested flush; MII preempts or fails

    def rules(self) -> SplitFuseRules:
        return SplitFuseRules(
            "DeepSpeed-MII 8abdd98 (FastGen)",
            "recordings of MII's RaggedBatchBase, step by step",
        )

    def initial_state(self) -> Any:
        return 0  # number of requested flushes

    def decide(self, view: View) -> Plan:
        release = list(islice(view.finished, view.state)) if view.state else ()
        flushes = len(view.finished) - len(release)
        count = view.decoding
        need = view.decode_block_need
        if count <= min(self.max_ragged_sequence_count, self.max_ragged_batch_size) and need <= view.pool.free:
            chunks = self._schedule_prompts(view, count, need) if view.waiting or view.prefilling else ()
            if count or chunks or release:
                hold = UNTIL_FINISH if not (chunks or release or flushes) else NO_HOLD
                return Plan(release=release, chunks=chunks, decode=count > 0 and "first", hold=hold, state=flushes)
        else:
            scheduled, skipped, used = self._schedule_decodes(view)
            chunks = self._schedule_prompts(view, len(scheduled), used)
            if scheduled or chunks or release:
                order = None
                if skipped:  # MII's buffer keeps skipped requests before those of the model call
                    started = [chunk.request for chunk in chunks if chunk.request.status != "running"]
                    order = Reorder(running=[*skipped, *scheduled, *view.prefilling, *started])
                batch = [*(Chunk(request, 1) for request in scheduled), *chunks]
                return Plan(release=release, chunks=batch, reorder=order, state=flushes)
        if (self.wait_for_flush and flushes) or not (view.waiting or view.running):
            return Plan(state=flushes)
        return Plan(preempt=[Preemption(self._choose_victim(view), "recompute", "back")], state=flushes)

    def _schedule_decodes(self, view: View) -> tuple[list[Request], list[Request], int]:
        """Return the requests that decode, the skipped requests, and the blocks that the decodes use."""
        scheduled: list[Request] = []
        skipped: list[Request] = []
        used = decoding = 0
        max_rows = min(self.max_ragged_sequence_count, self.max_ragged_batch_size)
        for request in view.running:
            if not request.decodes:
                continue
            decoding += 1
            need = view.pool.blocks_for(request.cached + 1) - request.blocks
            if decoding > max_rows or used + need > view.pool.free:
                skipped.append(request)
            else:
                used += need
                scheduled.append(request)
        return scheduled, skipped, used

    def _schedule_prompts(self, view: View, count: int, used: int) -> list[Chunk]:
        """Return chunks that fill the batch. If the rest of a prompt does not fit, later prompts wait."""
        chunks: list[Chunk] = []
        pool, tokens_left = view.pool, self.max_ragged_batch_size - count
        table_full = len(view.running) + len(view.finished) >= self.max_tracked_sequences
        for request in chain(view.prefilling, view.waiting):
            if not pool.free or count >= self.max_ragged_sequence_count or tokens_left <= 0:
                break
            rest = request.pending
            blocked = table_full and request.status == "waiting"
            if blocked or pool.blocks_for(request.length) - request.blocks > pool.free - used:
                if rest > 1:
                    break
                continue  # MII tests the blocks before it splits a prompt, and it does not split a single token
            tokens = min(rest, tokens_left)
            chunks.append(Chunk(request, tokens))
            used += pool.blocks_for(request.cached + tokens) - request.blocks
            tokens_left -= tokens
            count += 1
        return chunks

    def _choose_victim(self, view: View) -> Request:
        """Return the last request in MII's buffer that holds blocks. Partly computed prompts are at its front."""
        for request in reversed(view.running):
            if request.decodes:
                return request
        if view.prefilling:
            return view.prefilling[-1]
        why = "MII fails with an assertion: no request can run, and only finished, unflushed requests hold blocks"
        raise Stuck(why, list(view.waiting), view.now)

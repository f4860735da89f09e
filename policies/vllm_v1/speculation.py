"""The scheduler of vLLM V1 with speculative decoding: a decode computes its last token and its drafts.

If tokens and blocks suffice, all decoding requests verify all their drafts. Otherwise every request is scheduled one by
one, because each may get another number of tokens.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any, Final, Optional

from servesim.core import (
    DECODE_PAST_FINISH,
    DECODE_UNTIL_FINISH,
    CachedPrefix,
    Chunk,
    Plan,
    Preemption,
    Request,
    Stuck,
    View,
)
from servesim.policies.vllm_common import prefilling_is_last, requests_in

from .rules import Unscheduled
from .settings import VLLMSettings
from .step_pass import DECODE_ONCE, Pass

NO_PROMPTS: Final[AbstractSet[Request]] = frozenset()


def only_decodes(policy: VLLMSettings, view: View) -> bool:
    """Whether all requests decode, and nothing is short, so that they need not be looked at."""
    rows, drafting = view.decoding, policy.drafting
    return (
        rows > 0
        and not view.waiting
        and rows == len(view.running)
        and rows * (1 + drafting.tokens + drafting.slots) <= policy.max_num_batched_tokens
        and 1 + drafting.tokens <= policy.max_chunk(rows)
        and view.decode_block_need <= view.pool.free
    )


class DraftPass(Pass):
    """One decision with drafts, or with blocks that it reports to the cache."""

    def __init__(self, policy: VLLMSettings, view: View, one_by_one: bool = False) -> None:
        super().__init__(policy, view, policy.max_num_batched_tokens, view.pool.free)
        self.drafting, self.inputs = policy.drafting, self.tokens
        self.taken = 0  # blocks of running requests since the last preemption
        self.prompts = set(view.prefilling) if view.prefilling else NO_PROMPTS
        self.in_prompt = False  # a request that is scheduled was in the middle of its prompt
        self.changes: Optional[list[Any]] = None  # of a cache that takes the blocks itself
        self.decodes = not one_by_one  # whether the step has decodes of all their drafts, beside the chunks

    @property
    def room(self) -> int:
        return min(self.tokens, self.inputs - self.drafting.slots)

    def spend(self, request: Request, computed: int, tokens: int) -> None:
        self.tokens -= tokens
        self.inputs -= tokens + self.drafting.slots

    def blocks(self, tokens: int) -> int:
        """Return the blocks of these computed tokens, and of what the drafter writes."""
        return self.view.pool.blocks_for(min(tokens + self.drafting.lookahead, self.most))

    def cut(self, missing: int, tokens: int) -> int:
        """Return fewer tokens if they would end too near before the end of the known tokens, of which some miss."""
        ahead = self.drafting.prefill_lookahead
        left = missing - tokens
        return max(0, tokens - (ahead - left)) if ahead > 1 and 0 < left < ahead else tokens

    def running_tokens(self, request: Request) -> int:
        cached, in_flight = request.cached, request.in_flight
        if in_flight and cached + 2 - in_flight >= request.prompt + request.max_tokens:
            return 0  # its last token is in flight
        goal = request.length + request.drafts
        tokens = min(goal - cached, self.max_chunk, self.room, self.most - 1 - cached)
        return self.cut(request.length - in_flight - cached, tokens)

    def run(self) -> Plan:
        view, cache = self.view, self.view.prefix_cache
        self.decodes = self.decodes and self._decode_all()
        queue = view.prefilling if self.decodes else view.running
        running = list(queue) if queue else []
        if cache is not None and (running or not view.waiting):  # otherwise it starts below
            cache.start(decodes=False)
        if running:
            self.schedule_running(running)
        if self.decodes and self.preempt:  # the victim may be one that decodes
            return self.run_one_by_one()
        chunks, may_grow = list(self.scheduled.values()), False
        if not self.preempt and view.waiting:
            may_grow = self.admit(chunks)
        if chunks or not self.decodes:
            return Plan(preempt=self.preempt, chunks=chunks, decode=self.decodes and "first", extra=self.changes)
        plan = DECODE_ONCE if may_grow else DECODE_UNTIL_FINISH if view.waiting else DECODE_PAST_FINISH
        return Plan(decode=True, hold=plan.hold, extra=self.changes) if self.changes else plan

    def run_one_by_one(self) -> Plan:
        """Decide again, request by request."""
        return DraftPass(self.policy, self.view, one_by_one=True).run()

    def _decode_all(self) -> bool:
        """Take what the decoding requests need for all their drafts. Return False if that is not possible."""
        view, rows = self.view, self.view.decoding
        tokens = rows * (1 + self.drafting.tokens)
        if not rows or tokens > self.tokens or tokens + rows * self.drafting.slots > self.inputs:
            return False
        if 1 + self.drafting.tokens > self.max_chunk or not prefilling_is_last(view.running, view.prefilling):
            return False
        if len(view.running) > rows + len(view.prefilling):  # they await their end, or get other drafts
            for request in view.running:
                if not request.decodes and request not in self.prompts and self.running_tokens(request) > 0:
                    return False
        if not self.take_decodes():
            return False
        self.tokens -= tokens
        self.inputs -= tokens + self.drafting.slots * rows
        return True

    def take_decodes(self) -> bool:
        """Plan to give the decoding requests their blocks. Return False if some are missing."""
        need = self.view.decode_block_need
        if need > self.free:
            return False
        self.free -= need
        return True

    def give(self, request: Request, tokens: int, missing: int) -> None:
        drafts = max(0, min(tokens + request.cached - request.length, request.drafts))
        self.in_prompt = self.in_prompt or request in self.prompts
        self.scheduled[request] = Chunk(request, tokens, request.blocks + missing, drafts=drafts)
        self.take(request, tokens, missing)
        self.spend(request, request.cached, tokens)

    def missing(self, request: Request, tokens: int) -> int:
        return max(0, self.blocks(request.cached + tokens) - request.blocks)

    def take(self, request: Request, tokens: int, missing: int) -> None:
        """Plan to give a running request these blocks."""
        self.free -= missing
        self.taken += missing

    def release(self, victim: Request, tokens: int, blocks: int) -> None:
        """Plan to free the blocks of a request to which the step had given tokens."""
        cache = self.view.prefix_cache
        self.free += blocks if cache is None else cache.preempt(victim, tokens, blocks)

    def put_off(self, victim: Request) -> None:
        chunk = self.scheduled.pop(victim, None)
        tokens, blocks = (0, victim.blocks) if chunk is None else (chunk.tokens, chunk.blocks)
        taken, self.taken = self.taken - (blocks - victim.blocks), 0
        self.preempt.append(Preemption(victim, extra=Unscheduled(tokens, blocks, taken)))
        self.release(victim, tokens, blocks)
        if chunk is not None:
            self.tokens += tokens
            self.inputs += tokens + self.drafting.slots

    def first_chunk(self, request: Request, cached: int) -> Optional[Chunk]:
        missing, drafts = request.length - cached, self.drafting.tokens
        if missing == 1 and self._pads(cached):
            if 1 + drafts > self.room:
                return None
            tokens = min(1 + drafts, self.max_chunk)  # `enter` refuses fewer
            return Chunk(request, tokens, self.blocks(cached + tokens), cached, drafts)
        tokens = self.cut(missing, self.first_tokens(request, cached))
        return Chunk(request, tokens, self.blocks(cached + tokens), cached) if tokens > 0 else None

    def enter(self, chunk: Chunk, prefix: CachedPrefix, taken: int) -> None:
        if chunk.drafts >= chunk.tokens:
            why = "vLLM aborts (AssertionError in schedule): long_prefill_token_threshold cuts empty drafts"
            raise Stuck(why, requests_in(self.view), self.view.now)
        self.hold(chunk, prefix, taken)

    def hold(self, chunk: Chunk, prefix: CachedPrefix, taken: int) -> None:
        """Plan to give an admitted request these free blocks, and those of its prefix."""
        super().enter(chunk, prefix, taken)

    def _pads(self, cached: int) -> bool:
        """Whether a request that needs one token gets empty drafts, so that all decodes have the same shape."""
        return (
            self.drafting.tokens > 0
            and not self.in_prompt
            and (self.decodes or bool(self.scheduled) or cached > 0)
            and cached + 2 + self.drafting.tokens <= self.most
        )

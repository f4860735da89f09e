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
    FOREVER,
    NOT_CACHED,
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

NO_PROMPTS: Final[AbstractSet[Request]] = frozenset()
DECODE_ONCE: Final = Plan(decode=True)


def decide(policy: VLLMSettings, view: View) -> Plan:
    """Return the plan of a step. If no prompt is there and nothing is short, the requests need not be looked at."""
    rows, drafting = view.decoding, policy.drafting
    if rows and rows == len(view.running) and not len(view.waiting):
        inputs = rows * (1 + drafting.tokens + drafting.slots)
        if (
            inputs <= policy.max_num_batched_tokens
            and 1 + drafting.tokens <= policy.max_chunk(rows)
            and view.decode_block_need <= view.pool.free
        ):
            return DECODE_PAST_FINISH
    return Pass(policy, view).run()


class Pass:
    """One decision: what is left for further requests, and what it has planned."""

    def __init__(self, policy: VLLMSettings, view: View, one_by_one: bool = False) -> None:
        self.policy, self.view, self.drafting = policy, view, policy.drafting
        self.tokens = self.inputs = policy.max_num_batched_tokens
        self.free = view.pool.free
        self.taken = 0  # blocks of running requests since the last preemption
        self.most = FOREVER if view.max_model_len is None else view.max_model_len
        self.max_chunk = policy.max_chunk(len(view.running) + len(view.waiting) or 1)
        self.scheduled: dict[Request, Chunk] = {}  # in batch order
        self.preempt: list[Preemption] = []
        self.prompts = set(view.prefilling) if len(view.prefilling) else NO_PROMPTS
        self.in_prompt = False  # a request that is scheduled was in the middle of its prompt
        self.returning: AbstractSet[Request] = NO_PROMPTS  # preempted requests that a step in flight still computes
        self.changes: Optional[list[Any]] = None  # of a cache that takes the blocks itself
        self.decodes = not one_by_one and self._decode_all()

    @property
    def room(self) -> int:
        """The most tokens of one more request."""
        return min(self.tokens, self.inputs - self.drafting.slots)

    def spend(self, tokens: int, rows: int = 1) -> None:
        self.tokens -= tokens
        self.inputs -= tokens + self.drafting.slots * rows

    def blocks(self, tokens: int) -> int:
        """Return the blocks of a request with these computed tokens, and of what the drafter writes."""
        return self.view.pool.blocks_for(min(tokens + self.drafting.lookahead, self.most))

    def cut(self, missing: int, tokens: int) -> int:
        """Return fewer tokens if they would end too near before the end of the known tokens, of which some miss."""
        ahead = self.drafting.prefill_lookahead
        left = missing - tokens
        return max(0, tokens - (ahead - left)) if ahead > 1 and 0 < left < ahead else tokens

    def running_tokens(self, request: Request) -> int:
        """Return the tokens of a running request in this step."""
        cached, in_flight = request.cached, request.in_flight
        if in_flight and cached + 2 - in_flight >= request.prompt + request.max_tokens:
            return 0  # its last token is in flight
        goal = request.length + request.drafts
        tokens = min(goal - cached, self.max_chunk, self.room, self.most - 1 - cached)
        return self.cut(request.length - in_flight - cached, tokens)

    def run(self) -> Plan:
        view, cache = self.view, self.view.prefix_cache
        queue = view.prefilling if self.decodes else view.running
        running = list(queue) if len(queue) else []
        if cache is not None and (running or not len(view.waiting)):  # otherwise it starts below
            cache.start(decodes=False)
        goes_on = not running or self._schedule_running(running)
        if self.decodes and self.preempt:  # the victim may be one that decodes
            return Pass(self.policy, view, one_by_one=True).run()
        chunks, may_grow = list(self.scheduled.values()), False
        if goes_on and not self.preempt and len(view.waiting):
            if cache is not None:
                cache.start(chunks, self.decodes)
            may_grow = self._admit(chunks)
        if chunks or not self.decodes:
            return Plan(preempt=self.preempt, chunks=chunks, decode=self.decodes and "first", extra=self.changes)
        if may_grow:
            return DECODE_ONCE
        return DECODE_UNTIL_FINISH if len(view.waiting) else DECODE_PAST_FINISH

    def _decode_all(self) -> bool:
        """Take what the decoding requests need for all their drafts. Return False if that is not possible."""
        view, rows, need = self.view, self.view.decoding, self.view.decode_block_need
        tokens = rows * (1 + self.drafting.tokens)
        if not rows or need > self.free or tokens > self.tokens or tokens + rows * self.drafting.slots > self.inputs:
            return False
        if 1 + self.drafting.tokens > self.max_chunk or not prefilling_is_last(view.running, view.prefilling):
            return False
        if len(view.running) > rows + len(view.prefilling):  # they await their end, or get other drafts
            for request in view.running:
                if not request.decodes and request not in self.prompts and self.running_tokens(request) > 0:
                    return False
        self.spend(tokens, rows)
        self.free -= need
        return True

    def _schedule_running(self, running: list[Request]) -> bool:
        """Schedule running requests. Return whether waiting ones may follow."""
        index = 0
        while index < len(running) and self.room > 0:
            request = running[index]
            tokens = self.running_tokens(request)
            if tokens <= 0:
                index += 1
                continue
            missing, first = self.missing(request, tokens), len(self.preempt)
            while missing > self.free:
                victim = self.policy.victim(running)
                index -= running.index(victim) < index  # also if it was passed over
                running.remove(victim)
                self._preempt(victim)
                if victim is request:
                    self.preempt[first:] = [frees_last(gone) for gone in self.preempt[first:]]
                    return False
            drafts = max(0, min(tokens + request.cached - request.length, request.drafts))
            self.in_prompt = self.in_prompt or request in self.prompts
            self.scheduled[request] = Chunk(request, tokens, request.blocks + missing, drafts=drafts)
            self.take(request, tokens, missing)
            self.spend(tokens)
            index += 1
        return True

    def missing(self, request: Request, tokens: int) -> int:
        """Return the blocks that a running request needs for these tokens."""
        return max(0, self.blocks(request.cached + tokens) - request.blocks)

    def take(self, request: Request, tokens: int, missing: int) -> None:
        """Plan to give a running request these blocks."""
        self.free -= missing
        self.taken += missing

    def release(self, victim: Request, tokens: int, blocks: int) -> None:
        """Plan to free the blocks of a request to which the step had given tokens."""
        cache = self.view.prefix_cache
        self.free += blocks if cache is None else cache.preempt(victim, tokens, blocks)

    def _preempt(self, victim: Request) -> None:
        """Plan to preempt a request, which may be scheduled in this step."""
        chunk = self.scheduled.pop(victim, None)
        tokens, blocks = (0, victim.blocks) if chunk is None else (chunk.tokens, chunk.blocks)
        taken, self.taken = self.taken - (blocks - victim.blocks), 0
        self.preempt.append(Preemption(victim, extra=Unscheduled(tokens, blocks, taken)))
        self.release(victim, tokens, blocks)
        if chunk is not None:
            self.tokens += tokens
            self.inputs += tokens + self.drafting.slots

    def _admit(self, chunks: list[Chunk]) -> bool:
        """Add the first chunks of waiting requests. Return whether the head may soon find more cached blocks."""
        policy, view, pool = self.policy, self.view, self.view.pool
        seats = (policy.max_num_active_seqs or policy.max_num_seqs) - len(view.running)
        watermark, prefix = int(policy.watermark * (pool.total + 1)), NOT_CACHED
        for request in view.waiting:
            if seats <= 0 or self.room <= 0:
                break
            if request in self.returning:
                continue
            prefix = self.find(request)
            cached = prefix.tokens
            missing = request.length - cached
            tokens, drafts = min(missing, self.max_chunk), 0
            if missing == 1 and self._pads(cached):
                drafts = self.drafting.tokens
                if 1 + drafts > self.room:
                    break
                if 1 + drafts > self.max_chunk:
                    why = "vLLM aborts (AssertionError in schedule): long_prefill_token_threshold cuts empty drafts"
                    raise Stuck(why, requests_in(view), view.now)
                tokens += drafts
                if tokens > self.max_chunk:
                    why = "vLLM ends with an AssertionError: long_prefill_token_threshold cuts empty drafts of request"
                    raise Stuck(f"{why} {request.id}", requests_in(view), view.now)
            elif tokens > self.room and not policy.enable_chunked_prefill:
                break
            tokens = min(tokens, self.room)
            tokens = tokens if drafts else self.cut(missing, tokens)
            blocks = self.blocks(cached + tokens)
            need = taken = self.admission_blocks(request, prefix, blocks, False)
            if policy.scheduler_reserve_full_isl:
                whole = pool.blocks_for(min(request.length, self.most))
                need = max(need, self.admission_blocks(request, prefix, whole, True))
            if tokens <= 0 or need + (watermark if view.running or chunks else 0) > self.free:
                break
            self.spend(tokens)
            chunk = Chunk(request, tokens, blocks, cached, drafts)
            chunks.append(chunk)
            self.admit(chunk, prefix, taken)
            seats -= 1
        return prefix.may_grow

    def find(self, request: Request) -> CachedPrefix:
        """Return what the cache has of a waiting request."""
        cache = self.view.prefix_cache
        return NOT_CACHED if cache is None else cache.find(request, self.free)

    def admission_blocks(self, request: Request, prefix: CachedPrefix, blocks: int, is_whole: bool) -> int:
        """Return the free blocks that a waiting request takes to hold these; `is_whole`: for all its tokens."""
        return blocks - (prefix.tokens // self.view.pool.block_size - prefix.idle_blocks)

    def admit(self, chunk: Chunk, prefix: CachedPrefix, taken: int) -> None:
        """Plan to admit the request of a chunk, which takes these free blocks."""
        self.free -= taken
        if self.view.prefix_cache is not None:
            self.view.prefix_cache.admit(chunk.request, prefix, chunk.tokens - chunk.drafts)

    def _pads(self, cached: int) -> bool:
        """Whether a request that needs one token gets empty drafts, so that all decodes have the same shape."""
        return (
            self.drafting.tokens > 0
            and not self.in_prompt
            and (self.decodes or bool(self.scheduled) or cached > 0)
            and cached + 2 + self.drafting.tokens <= self.most
        )


def frees_last(preemption: Preemption) -> Preemption:
    """Return a preemption whose request releases its blocks after the chunks have taken theirs."""
    extra = Unscheduled() if preemption.extra is None else preemption.extra
    return preemption._replace(extra=extra._replace(frees_last=True))

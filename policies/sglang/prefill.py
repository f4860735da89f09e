"""SGLang's prefill: settings, order of the waiting queue, and the prompts of one step with their budgets."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, Literal, Optional

from servesim.core import (
    FOREVER,
    NOT_CACHED,
    CachedPrefix,
    Chunk,
    Float0,
    Int0,
    Int1,
    Policy,
    Queue,
    Reorder,
    Request,
    Stuck,
    View,
    require_effect,
)
from servesim.core.native import mypyc_attr

from .radix_draft import RadixDraft
from .rules import CacheUse

CACHE_ORDERS: Final = ("lpm", "dfs-weight")
MAX_SORTED: Final = 128  # with more waiting requests, longest prefix match is first come, first served
IN_BATCH_TOKENS: Final = 32  # a request that shares this number of tokens with an uncached one waits for it

# Requests that were looked up in the radix cache, and their tokens.
Lookups = list[tuple[Request, int]]


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class SGLangSettings(Policy):
    """The settings of SGLang."""

    version: Literal["0.4.6", "0.5.18"] = "0.5.18"  # version whose rules apply
    # fcfs, lof (longest limit first), lpm (longest cached prefix first), dfs-weight
    schedule_policy: Literal["fcfs", "lof", "lpm", "dfs-weight"] = "fcfs"
    disable_radix_cache: bool = False  # requests share no blocks
    max_prefill_tokens: Int1 = 16384  # prompt tokens per prefill; a single prompt may be longer
    chunked_prefill_size: Optional[Int1] = 8192  # tokens per prefill step; null: whole prompts
    max_running_requests: Optional[Int1] = None  # maximum decoding requests; null: SGLang's estimate
    schedule_conservativeness: Float0 = 1.0  # factor of init_new_token_ratio
    enable_mixed_chunk: bool = False  # mixed steps: decodes run with prompts
    disable_overlap_schedule: bool = False  # decide a step after the last one has ended, not while it runs
    prefill_decode_interval: Int0 = 0  # decode steps after a prefill step, before the next one (0.5.18)
    ignore_eos: bool = False  # the requests set ignore_eos: admission expects every output to reach its limit
    init_new_token_ratio: Float0 = 0.7  # first fraction of future output tokens that admissions reserve
    min_new_token_ratio_factor: Float0 = 0.14  # lowest fraction, relative to the first one
    new_token_ratio_decay_steps: Int1 = 600  # decode steps from the first to the lowest fraction
    retract_decode_steps: Int1 = 20  # decode steps that must fit after a preemption (0.4.6); part of the new fraction
    clip_max_new_tokens: Int1 = 4096  # maximum future output tokens that are counted per request

    def __post_init__(self) -> None:
        super().__post_init__()
        require_effect(self, not self.is_old, "version: 0.5.18", "prefill_decode_interval")

    @property
    def is_old(self) -> bool:
        """Whether the rules are those of 0.4.6."""
        return self.version == "0.4.6"


class Tried:
    """What the attempt of a prefill did to the radix cache and to the waiting queue, also if it admitted no request."""

    __slots__ = ("lookups", "order")

    def __init__(self, lookups: Lookups, order: Optional[list[Request]] = None) -> None:
        self.lookups = lookups
        self.order = order  # the new order of the waiting queue

    def reorder(self, running: Optional[list[Request]] = None) -> Optional[Reorder]:
        """Return the new orders of the queues, with this one of the running queue."""
        return None if self.order is None and running is None else Reorder(self.order, running)

    def cache_use(self, make_room: int = 0) -> Optional[CacheUse]:
        """Return what the step does to the radix cache."""
        return CacheUse(tuple(self.lookups), make_room) if self.lookups or make_room else None


NOTHING_TRIED: Final = Tried([])


def order_by_cache(policy: str, waiting: Queue, cache: RadixDraft, left_out: int) -> tuple[list[Request], Lookups]:
    """Return the waiting queue in its new order, and all lookups. A lookup leaves out tokens at the end."""
    lookups = [(request, request.length - left_out) for request in waiting]
    if policy == "dfs-weight":
        return cache.by_weight(lookups), lookups
    ranks: dict[Request, int] = {}
    uncached: dict[Hashable, Lookups] = {}  # by the first text of their prompts
    for request, tokens in lookups:
        found = cache.matched(request, tokens)
        ranks[request] = -min(found, request.length - 1)
        if found <= IN_BATCH_TOKENS and request.content is not None:
            similar = uncached.setdefault(request.content.names[0], [])
            if any(
                cache.common_tokens(request, other, min(tokens, length)) >= IN_BATCH_TOKENS for other, length in similar
            ):
                ranks[request] = 1  # last
            else:
                similar.append((request, tokens))
    return sorted(waiting, key=lambda request: ranks[request]), lookups


def known_length(request: Request) -> int:
    """Return the tokens of a request that the scheduler knows: not the one of a step that still runs."""
    return request.prompt + request.written - request.in_flight


def out_of_memory(phase: str, view: View) -> Stuck:
    """Return the error with which SGLang ends."""
    reason = f"SGLang ends with an error: {phase} out of memory. Try to lower your batch size"
    return Stuck(reason, list(view.running), view.now)


class PrefillAdder:
    """The prompts of one prefill step, and what is left of its budgets. SGLang has a class of this name.

    0.5.18 counts whole pages, and one page more for each request. 0.4.6 counts tokens.
    """

    def __init__(
        self, policy: SGLangSettings, view: View, ratio: float, ended: list[tuple[int, Request]], full: bool
    ) -> None:
        self.policy, self.view = policy, view
        self.full = full  # no other request is admitted until the running batch shrinks
        self.chunks: list[Chunk] = []
        self.continues = False  # whether the last prompt continues in the next step
        self.page = 1 if policy.is_old else view.pool.block_size
        self.margin = 0 if policy.is_old else self.page
        self.ended = ended  # requests that have finished and are still in the running batch
        self.rows = view.decoding + len(ended)
        self.blocks = view.pool.free + view.pool.evictable  # less the cached blocks that this step uses
        mixed = self.rows if policy.enable_mixed_chunk else 0
        self.now_offset = mixed  # tokens that this step takes
        # and those that requests may generate later
        self.total_offset = mixed + self._reserved(ratio)
        self.input_left = policy.max_prefill_tokens - mixed
        size = policy.chunked_prefill_size
        self.chunk_left = FOREVER if size is None else size - mixed
        self.cache = view.prefix_cache
        if self.cache is not None:
            self.cache.start()
        self.tried = NOTHING_TRIED
        self.looks_up_again = True  # each request that is tried, also if the order has done so
        self.lengths: list[tuple[int, int]] = []  # with ignore_eos: (tokens to generate, tokens held) of all requests

    def _running_batch(self) -> list[Request]:
        """Return the running batch of SGLang: requests that ended since the last decode was decided are still in it."""
        view = self.view
        batch = list(view.running)
        for index, request in self.ended:
            batch.insert(index, request)
        for request in view.prefilling:
            batch.remove(request)
        return batch

    def _reserved(self, ratio: float) -> float:
        """Return the tokens that are reserved for the running batch. The order of the sum matters for its rounding."""
        clip, reserved = self.policy.clip_max_new_tokens, 0.0
        view, most = self.view, self._most_reserved(ratio)
        if len(view.waiting) < 8:
            needs = (len(view.waiting) + len(view.prefilling)) * (clip + 2 * self.margin)
            for request in view.waiting:
                needs += request.length
            for request in view.prefilling:
                needs += request.length
            if most + self.rows + needs < self.free:  # all fit, so the exact sum changes nothing
                return most
        for request in self._running_batch():
            left = request.max_tokens + request.prompt - known_length(request)
            reserved += (left if left < clip else clip) * ratio
        return reserved

    def _most_reserved(self, ratio: float) -> float:
        """Return an upper bound of the sum, without a loop over the running batch."""
        cohort = self.view.cohort
        future = cohort.max_length - cohort.context
        for _, request in self.ended:
            future += request.max_tokens
        return future * ratio * (1 + 1e-9)

    @property
    def free(self) -> int:
        """Tokens that the step and later ones can take."""
        return self.blocks * self.view.pool.block_size

    def fill(self) -> None:
        """Continue the partly computed prompt, then admit from waiting until a budget is used up."""
        prefilling, max_rows = self.view.prefilling, self._max_rows()
        if self.rows >= max_rows and (self.policy.is_old or not prefilling):
            self.full = True
            return
        waiting = self._order_waiting()
        for request in prefilling:
            room = self.chunk_left
            if not self.policy.is_old and int(self.free - self.total_offset) > 0:
                room = min(room, int(self.free - self.total_offset))
            if room > 0:
                self._append(request, min(request.pending, room), NOT_CACHED)
        max_new = max_rows - self.rows
        if not self.policy.is_old:  # a prompt that continues keeps its row, and counts as a new one too
            max_new = min(max_new, max_rows - self.view.decoding - len(prefilling))
        for request in waiting:
            if self.full or len(self.chunks) >= max_new:
                self.full = True
                return
            if not self._add(request):
                return

    def _order_waiting(self) -> Queue:
        """Return the waiting queue in the order of this step. An order that needs the radix cache is stored."""
        waiting, kind = self.view.waiting, self.policy.schedule_policy
        if self.cache is None or kind not in CACHE_ORDERS or (kind == "lpm" and len(waiting) > MAX_SORTED):
            return waiting
        assert isinstance(self.cache, RadixDraft)
        order, lookups = order_by_cache(kind, waiting, self.cache, 1 if self.policy.is_old else 0)
        self.tried = Tried(lookups, None if order == list(waiting) else order)
        self.looks_up_again = not self.policy.is_old
        return order

    def _max_rows(self) -> int:
        policy, pool, context = self.policy, self.view.pool, self.view.max_model_len
        tokens = pool.total * pool.block_size
        estimate = min(max(0 if context is None else int(tokens / context * 512), 2048), 4096)
        if policy.is_old:
            return policy.max_running_requests or min(tokens // 2, estimate + 1)
        return min(policy.max_running_requests or estimate, tokens // 2)

    def _add(self, request: Request) -> bool:
        """Add a request if it fits. Return whether to try the next request."""
        prefix, room = self._find(request), self.chunk_left
        rest = request.length - prefix.tokens
        if self.policy.ignore_eos and self.cache is None:
            if not self._outputs_fit(request):
                self.full = True
                return False
            whole = rest <= room
        else:
            left = self.free - self.total_offset - self._need(request, rest)
            if left <= 0:
                self.full = True
                return False
            if self.chunks and self._exceeds_input(rest):
                return False
            left -= prefix.idle_blocks * self.view.pool.block_size
            if left < 0 or (left == 0 and not self.policy.is_old):
                self.full = True
                return False
            room = room // self.page * self.page
            whole = self._round_up(rest) <= self.chunk_left
        if not whole and room <= 0:
            return False
        self._append(request, rest if whole else room, prefix)
        if self.free <= self.total_offset or self.free <= self.now_offset:
            self.full = True
            return False
        return self.input_left > 0 and self.chunk_left > 0

    def _find(self, request: Request) -> CachedPrefix:
        """Look up the cached prefix of a waiting request."""
        if self.cache is None:
            return NOT_CACHED
        prefix = self.cache.find(request, self.blocks)
        if prefix.tokens and self.looks_up_again:
            if self.tried is NOTHING_TRIED:
                self.tried = Tried([])
            self.tried.lookups.append((request, request.length - 1))
        return prefix

    def _need(self, request: Request, rest: int) -> int:
        """Return the tokens that a request needs until its end. 0.4.6 counts generated tokens twice."""
        output = request.max_tokens
        if not self.policy.is_old:
            output = max(output - request.written, 0)
        return rest + min(output, self.policy.clip_max_new_tokens) + self.margin

    def _exceeds_input(self, rest: int) -> bool:
        if self.policy.is_old:
            return rest > self.input_left
        return self.policy.chunked_prefill_size is None and self._round_up(rest) >= self.input_left

    def _outputs_fit(self, request: Request) -> bool:
        """Whether all requests can generate up to their limits if this one is admitted (ignore_eos)."""
        free, rest = self.free - self.now_offset, request.length
        if self.policy.is_old:
            room = free - request.prompt
        else:
            room = free - self._round_up(rest)
            if room < 0 or self._round_up(rest) > self.free - self.total_offset:
                return False
        self._list_lengths(request)
        lengths = self.lengths
        for index, (left, held) in enumerate(lengths):
            count = len(lengths) - index
            if self.policy.is_old:
                steps = lengths[index + 1][0] if count > 1 else left
                if room - steps * count <= 0:
                    return False
            elif room - left * count <= count:
                return False
            room += held
        return True

    def _list_lengths(self, request: Request) -> None:
        """Add a request to `lengths`. Behind the longest one SGLang inserts it at the wrong place."""
        lengths, requests = self.lengths, [request]
        if not lengths:
            requests += [*self._running_batch(), *(chunk.request for chunk in self.chunks)]
        new = [(r.max_tokens + r.prompt - known_length(r), known_length(r)) for r in requests]
        new = [(left, held) for left, held in new if left > 0]
        if not lengths:
            lengths += sorted(new, key=lambda length: length[0])
        elif new:
            places = [index for index, (left, _) in enumerate(lengths) if left >= new[0][0]]
            lengths.insert(places[0] if places else len(lengths) - 1, new[0])

    def _round_up(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    def _append(self, request: Request, tokens: int, prefix: CachedPrefix) -> None:
        self.continues = tokens < request.pending - prefix.tokens
        output = 0 if self.continues else min(request.max_tokens, self.policy.clip_max_new_tokens)
        rounded = self._round_up(tokens)
        self.chunks.append(Chunk(request, tokens, cached=prefix.tokens))
        if self.cache is not None and prefix.tokens:
            self.cache.admit(request, prefix, tokens)
            self.blocks -= prefix.idle_blocks
        self.now_offset += rounded + self.margin
        self.total_offset += rounded + output + self.margin
        self.input_left -= rounded
        self.chunk_left -= rounded

    def check_memory(self, decode: bool) -> None:
        """Raise Stuck if the step needs more memory than is free: SGLang does not test this before."""
        view, pool = self.view, self.view.pool
        left = self.blocks
        for chunk in self.chunks:
            cached = chunk.cached or chunk.request.cached
            left -= pool.blocks_for(cached + chunk.tokens) - pool.blocks_for(cached)
        if left < 0:
            raise out_of_memory("Prefill", view)
        if decode and left < view.decode_block_need:
            raise out_of_memory("Decode", view)

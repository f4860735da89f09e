"""One round of MindIE-LLM: candidates from the queues, three passes over them, and the new order of the queues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, Optional, get_args

from servesim.core import Chunk, Int0, Int1, Plan, Policy, Preemption, Queue, Request, Stuck, View
from servesim.core.native import mypyc_attr

from .feedback import microseconds

StagePolicy = Literal["prefill-first", "throughput", "latency"]
STAGE_POLICIES: Final[tuple[str, ...]] = get_args(StagePolicy)
MAX_SEQ_LEN: Final = 2560  # shipped maxSeqLen, if the scenario has no max_model_len


def engine_died(message: str, request: Request, view: View) -> Stuck:
    """Return the error with which MindIE's scheduler ends."""
    return Stuck(f"MindIE's scheduler thread ends with an exception: {message}", [request], view.now)


def by_arrival(request: Request) -> tuple[float, int]:
    """Sort key: the order of arrival, which is that of MindIE's sequence ids."""
    return request.arrival, request.serial


def has_outputs(request: Request) -> bool:
    """Whether a token of a waiting request has come back."""
    return request.written > request.in_flight


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class MindIESettings(Policy):
    """The settings of MindIE-LLM, with its names and units."""

    max_batch_size: Int1 = 200  # seats of a decode round; more requests may run, in turns
    max_prefill_batch_size: Int0 = 50  # seats of a prefill round; 0: max_batch_size
    max_prefill_tokens: Int1 = 8192  # tokens per round; without split_fuse at least max_model_len
    stage_policy: StagePolicy = "prefill-first"  # prefill-first, throughput (supportSelectBatch) or latency
    prefill_time_ms_per_req: Int0 = 150  # weight of a prefill (throughput)
    decode_time_ms_per_req: Int0 = 50  # weight of a decode (throughput)
    max_preempt_count: Int0 = 0  # preempted requests that a round swaps to the host; it recomputes the others
    max_queue_delay_microseconds: Int1 = 5000  # wait of the first waiting request before a prefill (prefill-first)
    max_first_token_wait_time: Int0 = 2500  # ms; if the first waiting request lacks blocks longer, one is preempted
    max_iter_times: Int1 = 512  # most output tokens of a request
    split_fuse: bool = False  # chunked prefill in the same rounds as decodes; stage_policy has no effect
    prefill_chunk_size: Int0 = 0  # tokens of one prompt per round; 0: max_prefill_tokens (split_fuse)
    long_prefill_token_threshold: Int0 = 1024  # a prompt with more tokens left is long (split_fuse)
    max_long_partial_prefills: Int0 = 8  # long prompts in progress (split_fuse)
    prefill_expected_time: Int0 = 1500  # ms until the first token (latency)
    decode_expected_time: Int0 = 50  # ms per decode (latency, dynamic_batch_size)
    dynamic_batch_size: bool = False  # change both numbers of seats, so that a decode takes decode_expected_time
    async_scheduling: bool = False  # decide a round while the last one runs

    def token_budget(self, view: View) -> int:
        """Return the tokens of a round."""
        longest = MAX_SEQ_LEN if view.max_model_len is None else view.max_model_len
        return self.max_prefill_tokens if self.split_fuse else max(longest, self.max_prefill_tokens)


class Round:
    """One round of a kind: P (prefill), D (decode) or M (both, SplitFuse)."""

    def __init__(self, policy: MindIESettings, view: View, kind: str, seats: int, new_first: bool) -> None:
        self.policy = policy
        self.view = view
        self.kind = kind
        self.seats = seats
        self.tokens = policy.token_budget(view)
        self.new_first = new_first  # the running pass preempts one request, whatever it needs
        self.free, self.host_free = view.pool.free, view.pool.host_free
        self.release: list[Request] = []  # finished ones, found in a queue
        self.swaps: list[Preemption] = []
        self.recomputes: list[Preemption] = []
        self.decodes: list[Request] = []
        self.swap_in: list[Request] = []
        # prompts from waiting, from swapped and from running, in this order in the batch
        self.admitted: list[Chunk] = []
        self.swapped_chunks: list[Chunk] = []
        self.running_chunks: list[Chunk] = []
        self.popped = [0, 0, 0]  # requests taken from running, waiting and swapped
        self._window = 2 * seats
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.swapped: list[Request] = []
        if not seats:  # no candidates; a usual round finds its own
            return
        if kind != "P":
            self.running = self._pop(view.running, 0)
        if kind != "D":
            self.waiting = self._pop(view.waiting, 1)
        if kind != "P":
            self.swapped = self._pop(view.swapped, 2)
            self._pass_running()
            if not (self.swaps or self.recomputes):
                self._pass_swapped()
        if self.waiting:
            self.admit(self.waiting)
            started = {chunk.request for chunk in self.admitted}
            self.waiting = [request for request in self.waiting if request not in started]

    @property
    def is_empty(self) -> bool:
        """Whether the round computes nothing and moves no blocks."""
        return not (self.decodes or self.admitted or self.swapped_chunks or self.running_chunks or self.swaps)

    def _pop(self, queue: Queue, source: int) -> list[Request]:
        """Take candidates from the front of a queue. In a prefill round, new requests come first."""
        found: list[Request] = []
        resumed: list[Request] = []
        taken = 0
        for request in queue:
            if len(found) >= self._window:
                break
            taken += 1
            if request.status == "done":
                self.release.append(request)
                self.free += request.blocks
                self.host_free += request.host_blocks
            elif self.kind == "P" and has_outputs(request):
                resumed.append(request)
            else:
                found.append(request)
        self._window -= len(found)
        self.popped[source] = taken
        return found + resumed

    def chunk(self, request: Request, decodes: bool) -> int:
        """Return the tokens that a request takes from the budget."""
        rest = 1 if decodes else request.pending
        if self.kind != "M":
            return rest
        return min(rest, self.tokens, self.policy.prefill_chunk_size or self.policy.max_prefill_tokens)

    def _pass_running(self) -> None:
        candidates, pool, index = self.running, self.view.pool, 0
        while index < len(candidates):
            request = candidates[index]
            decodes = request.decodes
            tokens = self.chunk(request, decodes)
            if tokens > self.tokens or self.seats <= 0:
                break
            index += 1
            # a decode runs also if the budget has no token left for it
            need = max(0, pool.blocks_for(request.cached + (1 if decodes else tokens)) - request.blocks)
            while need > self.free or self.new_first:
                victim = candidates.pop()  # the last one: `request` itself if no other is left
                self._preempt(victim)
                self.new_first = False
                if victim is request:
                    candidates.clear()
                    return
            self.free -= need
            self.seats -= 1
            self.tokens -= tokens
            if decodes:
                self.decodes.append(request)
            else:
                self.running_chunks.append(Chunk(request, tokens))
        del candidates[:index]

    def _preempt(self, victim: Request) -> None:
        fits = self.view.pool.blocks_for(victim.length) <= self.host_free
        if fits and len(self.swaps) < self.policy.max_preempt_count:
            self.host_free -= victim.blocks
            self.swaps.append(Preemption(victim, "swap", "swapped"))
        else:
            self.recomputes.append(Preemption(victim, "recompute", "back"))
        self.free += victim.blocks

    def _pass_swapped(self) -> None:
        """Bring requests back. They need a free seat, but do not take it."""
        pool, index = self.view.pool, 0
        for request in self.swapped:
            need, decodes = pool.blocks_for(request.length), request.prompt_done
            if need > pool.total:
                raise engine_died("Sequence too long.", request, self.view)
            tokens = self.chunk(request, decodes)
            if need > self.free or not tokens or tokens > self.tokens or self.seats <= 0:
                break
            index += 1
            self.free -= max(request.host_blocks, pool.blocks_for(request.cached + tokens))
            self.host_free += request.host_blocks
            self.tokens -= tokens
            self.swap_in.append(request)
            if decodes:
                self.decodes.append(request)
            else:
                self.swapped_chunks.append(Chunk(request, tokens))
        del self.swapped[:index]

    def admit(self, candidates: Iterable[Request]) -> None:
        """The waiting pass: start requests until one does not fit. Long prompts are skipped if too many are started."""
        policy, pool, is_mixed, longs = self.policy, self.view.pool, self.kind == "M", self._count_longs()
        for request in candidates:
            need = pool.blocks_for(request.length)
            is_new = is_mixed or not has_outputs(request)  # SplitFuse takes known outputs for a part of the prompt
            is_long = is_mixed and request.pending > policy.long_prefill_token_threshold
            if is_long and longs >= policy.max_long_partial_prefills:
                continue
            tokens = self.chunk(request, False)
            if not self._fits(request, need, tokens, is_new):
                break
            longs += is_long
            self.free -= need
            self.seats -= 1
            self.tokens -= tokens
            self.admitted.append(Chunk(request, tokens, need))

    def _fits(self, request: Request, need: int, tokens: int, is_new: bool) -> bool:
        """Whether a waiting request may start now. A new one that lacks blocks for too long asks for a preemption."""
        if request.in_flight:  # preempted in an empty round: the value of its last token is not known
            return False
        if not is_new and need == self.free:  # a defect: it waits until another number of blocks is free
            return False
        if need > self.view.pool.total:
            raise engine_died("Prompt sequence too long.", request, self.view)
        if need > self.free:
            if is_new:
                waited = (microseconds(self.view.now) - microseconds(request.arrival)) // 1000
                self.new_first |= waited > self.policy.max_first_token_wait_time
            return False
        return 0 < tokens <= self.tokens and self.seats > 0

    def _count_longs(self) -> int:
        """Return the long prompts in progress when the round started."""
        if self.kind != "M":
            return 0
        threshold = self.policy.long_prefill_token_threshold
        return sum([request.pending > threshold for request in self.view.prefilling])

    def plan(self) -> Plan:
        """Return the plan, without a state."""
        view = self.view
        self.decodes.sort(key=by_arrival)
        prompts = [*self.admitted, *self.swapped_chunks, *self.running_chunks]
        chunks = [chunk for chunk in prompts if chunk.tokens]
        preempt = [*self.swaps, *self.recomputes]
        victims = [preemption.request for preemption in preempt]
        decoding = view.decoding - sum([victim.decodes for victim in victims])
        decoding += len(self.swap_in) - len(self.swapped_chunks)
        all_decode = 0 < len(self.decodes) == decoding
        if self.decodes and not all_decode:
            chunks = [*(Chunk(request, 1) for request in self.decodes), *chunks]
        return Plan(
            release=self.release, preempt=preempt, reorder_waiting=self._waiting_order(),
            reorder_swapped=self._swapped_order(), swap_in=self.swap_in, chunks=chunks, decode=all_decode,
            decode_first=True, reorder_running=self._running_order(victims, prompts),
        )  # fmt: skip

    def _running_order(self, victims: Sequence[Request], prompts: Sequence[Chunk]) -> Optional[Sequence[Request]]:
        """Return the order after the round: left candidates, others, decodes, prompts; None if it does not change."""
        if self.kind == "P":
            return None
        view = self.view
        order = sorted(self.running, key=by_arrival)
        order += islice(view.running, self.popped[0], None)
        order += self.decodes
        order += [chunk.request for chunk in prompts]
        gone = {*victims, *self.release}
        unchanged = [request for request in view.running if request not in gone]
        unchanged += self.swap_in
        unchanged += [chunk.request for chunk in self.admitted]
        return None if order == unchanged else order

    def _waiting_order(self) -> Optional[Sequence[Request]]:
        """Return the order before admissions: candidates that are left are sorted by arrival; None: no change."""
        order = sorted(self.waiting, key=by_arrival)
        if self.policy.is_sorted or (order == self.waiting and self.kind != "P"):
            return None
        left = {*order}
        if order == [request for request in islice(self.view.waiting, self.popped[1]) if request in left]:
            return None
        rest = islice(self.view.waiting, self.popped[1], None)
        return [*(c.request for c in self.admitted), *order, *rest, *(p.request for p in self.recomputes)]

    def _swapped_order(self) -> Optional[Sequence[Request]]:
        """The same for the swapped queue."""
        order = sorted(self.swapped, key=by_arrival)
        if order == self.swapped:
            return None
        rest = islice(self.view.swapped, self.popped[2], None)
        return [*self.swap_in, *order, *rest, *(preemption.request for preemption in self.swaps)]

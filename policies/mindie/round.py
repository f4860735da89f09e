"""The settings of MindIE-LLM, and one round: candidates from the queues, three passes, the new order of the queues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Literal, Optional, get_args

from servesim.core import FOREVER, Chunk, Int0, Int1, Plan, Policy, Preemption, Queue, Reorder, Request, View
from servesim.core.native import mypyc_attr

from .feedback import Feedback, microseconds
from .rules import engine_died
from .state import MindIEState

StagePolicy = Literal["prefill-first", "throughput", "latency"]
STAGE_POLICIES: Final[tuple[str, ...]] = get_args(StagePolicy)
MAX_SEQ_LEN: Final = 2560  # shipped maxSeqLen, if the scenario has no max_model_len


def by_arrival(request: Request) -> tuple[float, int]:
    """Sort key: the order of arrival, which is that of MindIE's sequence ids."""
    return request.arrival, request.serial


def has_outputs(request: Request) -> bool:
    """Whether a token of a waiting request has come back."""
    return request.written > request.in_flight


def fails_exact_fit(need: int, free: int) -> bool:
    """A defect: a preempted request that needs all free blocks waits until another number of blocks is free."""
    return need == free


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
    max_input_token_len: Optional[Int1] = None  # longest prompt that the server accepts; null: below max_model_len
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
    """One round of a kind: P (prefill), D (decode) or M (both, SplitFuse).

    `run` takes candidates from the queues and lets them run, as far as seats, tokens and blocks suffice. `plan` and
    `state` say what follows from it.
    """

    def __init__(self, policy: MindIESettings, view: View, kind: str, seats: int, by_name: bool) -> None:
        self.policy = policy
        self.view = view
        self.before: MindIEState = view.state
        self.kind = kind
        self.by_name = by_name  # `decodes` must have all requests that decode
        # what is left; `window` limits the candidates
        self.seats, self.tokens, self.window = seats, policy.token_budget(view), 2 * seats
        self.free, self.host_free = view.pool.free, view.pool.host_free
        self.new_first = self.before.new_first  # the running pass preempts one request, whatever it needs
        # Requests that were taken from the front of a queue: their number, and those that do not run. Most rounds need
        # few of these lists, so each starts as an empty tuple.
        self.running_taken, self.waiting_taken, self.swapped_taken = 0, 0, 0
        self.running_left: Sequence[Request] = ()
        self.waiting_left: Sequence[Request] = ()
        self.swapped_left: Sequence[Request] = ()
        # what happens
        self.release: Sequence[Request] = ()  # finished ones, found in a queue
        self.swaps: Sequence[Preemption] = ()
        self.recomputes: Sequence[Preemption] = ()
        self.swap_in: Sequence[Request] = ()
        self.all_run = False  # all running requests run, and those in the order of arrival are only counted:
        self.ahead = 0  # they decode, but are not in `decodes`
        self.tail: Sequence[Request] = ()  # the others, behind them
        self.decodes: Sequence[Request] = ()
        # prompts from waiting, then from swapped, then from running, as in the batch
        self.prompts: Sequence[Chunk] = ()
        self.admitted: Sequence[Chunk] = ()  # those from waiting
        self.swapped_prompts = 0  # the number of those from swapped

    @property
    def is_empty(self) -> bool:
        """Whether the round computes nothing and moves no blocks."""
        return not self.ahead and not self.decodes and not self.prompts and not self.swaps

    def run(self) -> None:
        """Take candidates from the queues of this kind of round, and pass over them."""
        if self.kind != "P":
            self._take_running()
        waiting = self._take_waiting() if self.kind != "D" and self.view.waiting else ()
        if self.kind != "P":
            if self.view.swapped:
                self.swapped_left, self.swapped_taken = self._take(self.view.swapped)
            if self.running_left:
                self._pass_running(list(self.running_left))
            if self.swapped_left and not (self.swaps or self.recomputes):
                self._pass_swapped()
        if waiting:
            self._pass_waiting(waiting)

    def _take(self, queue: Queue) -> tuple[list[Request], int]:
        """Take candidates from the front of a queue; also return how far. In a prefill round, new ones come first."""
        found: list[Request] = []
        resumed: list[Request] = []
        finished: list[Request] = []
        taken = 0
        for request in queue:
            if len(found) >= self.window:
                break
            taken += 1
            if request.status == "done":
                finished.append(request)
                self.free += request.blocks
                self.host_free += request.host_blocks
            elif self.kind == "P" and has_outputs(request):
                resumed.append(request)
            else:
                found.append(request)
        self.window -= len(found)
        if finished:
            self.release = [*self.release, *finished]
        return found + resumed, taken

    def _take_running(self) -> None:
        """Take running requests. If all of them run, those that stand in the order of arrival are only counted.

        So a usual round, in which all decode, takes the same time for any number of requests.
        """
        view, decoding = self.view, self.view.decoding
        live, free, finished = decoding + len(view.prefilling), self.free - view.decode_block_need, self.release
        if view.finished:
            finished = [request for request in view.finished if request.blocks]  # those in running
            free += sum([request.blocks for request in finished])
        lacks = live > self.seats or decoding > self.tokens or free < 0
        if lacks or self.new_first or view.swapped or not self._may_count(live):
            self.running_left, self.running_taken = self._take(view.running)
            return
        self.all_run, self.release, self.free, self.ahead = True, finished, free, decoding
        if self.before.tail:
            behind = islice(reversed(view.running), self.before.tail)
            tail = [request for request in behind if request.status != "done"]
            tail.reverse()
            self.ahead -= sum([request.decodes for request in tail])
            self.tail = self.running_left = tail
        self.running_taken = len(view.running)
        self.tokens -= self.ahead
        self.seats -= self.ahead
        self.window -= live

    def _may_count(self, live: int) -> bool:
        """Whether running requests may be counted. Apart from `by_name`, only the order of `release` depends on it."""
        before = self.before
        if self.kind == "D":
            return live > 0 and not self.by_name
        if live > 0 and not before.tail and not self.view.waiting:
            return True
        return not before.resumed and before.tail != FOREVER

    def _take_waiting(self) -> Iterable[Request]:
        """Take waiting requests. If none was preempted, they stand in their order, and none has finished."""
        if self.before.resumed:
            self.waiting_left, self.waiting_taken = self._take(self.view.waiting)
            return self.waiting_left
        waiting, window, count = self.view.waiting, self.window, len(self.view.waiting)
        self.window -= min(window, count)
        return waiting if count <= window else islice(waiting, window)

    def _chunk(self, request: Request, decodes: bool) -> int:
        """Return the tokens that a request takes from the budget."""
        rest = 1 if decodes else request.pending
        if self.kind != "M":
            return rest
        return min(rest, self.tokens, self.policy.prefill_chunk_size or self.policy.max_prefill_tokens)

    def _pass_running(self, candidates: list[Request]) -> None:
        """Run requests from the front; preempt from the back while blocks are missing."""
        decodes: list[Request] = []
        prompts: list[Chunk] = []
        self.decodes, self.prompts, index = decodes, prompts, 0
        while index < len(candidates):
            request = candidates[index]
            is_decode = request.decodes
            tokens = self._chunk(request, is_decode)
            if tokens > self.tokens or self.seats <= 0:
                break
            index += 1
            length = request.cached + (1 if is_decode else tokens)
            need = 0 if self.all_run else max(0, self.view.pool.blocks_for(length) - request.blocks)
            while need > self.free or self.new_first:
                victim = candidates.pop()  # the last one: `request` itself if no other is left
                self._preempt(victim)
                self.new_first = False
                if victim is request:
                    self.running_left = ()
                    return
            self.free -= need
            self.seats -= 1
            self.tokens -= tokens  # a decode runs also if the budget has no token left for it
            if is_decode:
                decodes.append(request)
            else:
                prompts.append(Chunk(request, tokens))
        self.running_left = candidates[index:]

    def _preempt(self, victim: Request) -> None:
        """Swap the first victims of a round to the host if they fit there; recompute the others."""
        fits = self.view.pool.blocks_for(victim.length) <= self.host_free
        if fits and len(self.swaps) < self.policy.max_preempt_count:
            self.host_free -= victim.blocks
            self.swaps = [*self.swaps, Preemption(victim, "swap", "swapped")]
        else:
            self.recomputes = [*self.recomputes, Preemption(victim, "recompute", "back")]
        self.free += victim.blocks

    def _pass_swapped(self) -> None:
        """Bring requests back. They need a free seat, but do not take it."""
        pool = self.view.pool
        decodes: list[Request] = []
        prompts: list[Chunk] = []
        for request in self.swapped_left:
            need, is_decode = pool.blocks_for(request.length), request.prompt_done
            if need > pool.total:
                raise engine_died("Sequence too long.", request, self.view)
            tokens = self._chunk(request, is_decode)
            if need > self.free or not tokens or tokens > self.tokens or self.seats <= 0:
                break
            self.free -= max(request.host_blocks, pool.blocks_for(request.cached + tokens))
            self.host_free += request.host_blocks
            self.tokens -= tokens
            if is_decode:
                decodes.append(request)
            else:
                prompts.append(Chunk(request, tokens))
        count = len(decodes) + len(prompts)
        self.swap_in, self.swapped_left = self.swapped_left[:count], self.swapped_left[count:]
        self.decodes, self.prompts = [*self.decodes, *decodes], [*prompts, *self.prompts]
        self.swapped_prompts = len(prompts)

    def _pass_waiting(self, candidates: Iterable[Request]) -> None:
        """Start requests until one does not fit. Long prompts are skipped if too many are started."""
        policy, pool, is_mixed, longs = self.policy, self.view.pool, self.kind == "M", self._count_longs()
        admitted: list[Chunk] = []
        for request in candidates:
            is_long = is_mixed and request.pending > policy.long_prefill_token_threshold
            if is_long and longs >= policy.max_long_partial_prefills:
                continue
            need, tokens = pool.blocks_for(request.length), self._chunk(request, False)
            if not self._may_start(request, need, tokens):
                break
            longs += is_long
            self.free -= need
            self.seats -= 1
            self.tokens -= tokens
            admitted.append(Chunk(request, tokens, need))
        self.admitted, self.prompts = admitted, [*admitted, *self.prompts] if self.prompts else admitted
        if self.waiting_left:
            started = {chunk.request for chunk in admitted}
            self.waiting_left = [request for request in self.waiting_left if request not in started]

    def _count_longs(self) -> int:
        """Return the long prompts in progress when the round started."""
        if self.kind != "M":
            return 0
        threshold = self.policy.long_prefill_token_threshold
        return sum([request.pending > threshold for request in self.view.prefilling])

    def _may_start(self, request: Request, need: int, tokens: int) -> bool:
        """Whether a waiting request starts now. A new one that lacks blocks for too long asks for a preemption."""
        is_new = self.kind == "M" or not has_outputs(request)  # SplitFuse takes known outputs for a part of the prompt
        if request.in_flight:  # preempted in an empty round: the value of its last token is not known
            return False
        if not is_new and fails_exact_fit(need, self.free):
            return False
        if need > self.view.pool.total:
            raise engine_died("Prompt sequence too long.", request, self.view)
        if need > self.free:
            if is_new:
                waited = (microseconds(self.view.now) - microseconds(request.arrival)) // 1000
                self.new_first |= waited > self.policy.max_first_token_wait_time
            return False
        return 0 < tokens <= self.tokens and self.seats > 0

    def plan(self) -> Plan:
        """Return the plan, without a hold and a state."""
        if len(self.decodes) > 1:
            self.decodes = sorted(self.decodes, key=by_arrival)
        chunks, preempt = self.prompts, self.recomputes
        if chunks and self.kind != "P":  # a running prompt may find no token left
            chunks = [chunk for chunk in chunks if chunk.tokens]
        decoding = self.view.decoding + len(self.swap_in) - self.swapped_prompts
        if self.swaps or self.recomputes:
            preempt = [*self.swaps, *self.recomputes]
            decoding -= sum([victim.request.decodes for victim in preempt])
        all_decode = 0 < self.ahead + len(self.decodes) == decoding
        if self.decodes and not all_decode:
            chunks = [Chunk(request, 1) for request in self.decodes] + list(chunks)
        waiting, running, swapped = self._waiting_order(), self._running_order(), self._swapped_order()
        order = None
        if waiting is not None or running is not None or swapped is not None:
            order = Reorder(waiting, running, swapped)
        decode = "first" if all_decode else False
        return Plan(self.release, preempt, order, self.swap_in, chunks=chunks, decode=decode)

    def _running_order(self) -> Optional[Sequence[Request]]:
        """Return the order after the round: left candidates, others, decodes, prompts; None if it does not change."""
        if self.kind == "P" or self._keeps_running_order():
            return None
        view, decodes = self.view, self.decodes
        if self.all_run:
            decodes = sorted([request for request in view.running if request.decodes], key=by_arrival)
        order = put_back(self.running_left, view.running, self.running_taken)
        order += [*decodes, *[chunk.request for chunk in self.prompts]]
        gone = {*[victim.request for victim in [*self.swaps, *self.recomputes]], *self.release}
        unchanged = [request for request in view.running if request not in gone]
        unchanged += self.swap_in
        unchanged += [chunk.request for chunk in self.admitted]
        return None if order == unchanged else order

    def _keeps_running_order(self) -> bool:
        """Whether all requests run in the order in which they stand: an answer without a look at all of them."""
        if not (self.all_run and (self.tail or self.prompts)):
            return self.all_run
        admitted, prompts = [chunk.request for chunk in self.admitted], [chunk.request for chunk in self.prompts]
        if [*self.decodes, *prompts] != [*self.tail, *admitted]:
            return False
        ahead = len(self.view.running) - self.before.tail
        return not self.decodes or ahead <= 0 or by_arrival(self.view.running[ahead - 1]) < by_arrival(self.decodes[0])

    def _waiting_order(self) -> Optional[Sequence[Request]]:
        """Return the order before admissions: candidates that are left are sorted by arrival; None: no change."""
        if not self.waiting_left or self.policy.is_sorted:
            return None
        left = {*self.waiting_left}
        unchanged = [request for request in islice(self.view.waiting, self.waiting_taken) if request in left]
        if sorted(unchanged, key=by_arrival) == unchanged:
            return None
        order = put_back(self.waiting_left, self.view.waiting, self.waiting_taken)
        return [*[chunk.request for chunk in self.admitted], *order, *[victim.request for victim in self.recomputes]]

    def _swapped_order(self) -> Optional[Sequence[Request]]:
        """The same for the swapped queue."""
        if not self.swapped_left or sorted(self.swapped_left, key=by_arrival) == self.swapped_left:
            return None
        order = put_back(self.swapped_left, self.view.swapped, self.swapped_taken)
        return [*self.swap_in, *order, *[victim.request for victim in self.swaps]]

    def state(self, waste: int, waste_step: int, feedback: Optional[Feedback]) -> MindIEState:
        """Return the state after the round."""
        resumed = self.before.resumed + len(self.recomputes)
        if resumed:
            resumed -= sum([chunk.request.preemptions > 0 for chunk in self.admitted])
        tail = len(self.prompts)
        if self.kind == "P":
            tail = self.before.tail if resumed == self.before.resumed else FOREVER
            resumed -= len(self.release)
        elif self.running_left or self.running_taken < len(self.view.running):
            tail = FOREVER
        if feedback is None and self._repeats(waste, waste_step, resumed, tail):
            return self.before
        return MindIEState(self.kind, self.is_empty, self.new_first, waste, waste_step, resumed, tail, feedback)

    def _repeats(self, waste: int, waste_step: int, resumed: int, tail: int) -> bool:
        """Whether the state stays as it is, as in most decode rounds. A new object would cost more than this."""
        old = self.before
        return (
            old.tail == tail and old.resumed == resumed and old.waste == waste and old.waste_step == waste_step
            and old.last_empty == self.is_empty and old.new_first == self.new_first and old.kind == self.kind
        )  # fmt: skip


def put_back(left: Sequence[Request], queue: Queue, taken: int) -> list[Request]:
    """Return a queue without the requests that run: those that are left, by arrival, then those not taken."""
    return [*sorted(left, key=by_arrival), *islice(queue, taken, None)]

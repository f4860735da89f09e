"""The server: waiting, running and swapped over one pool of blocks. The only code that moves a request.

It carries out plans; it never decides and never waits. `begin` takes a plan's memory and says what the model call
is, `end` books what the call produced. `check` verifies the books.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any, Optional

from servesim.core import FOREVER, BlockPool, Chunk, Eviction, Plan, Policy, Rejection, Request, View

from .admission import Limits
from .cohort import Cohort
from .queues import Fifo, Line, Ranked, Slotted, line
from .step import Gaps, Step

LINES: dict[str, Any] = {  # of the running, by how the engine keeps its batch; and of those among them who prefill
    "admission": (Fifo, Fifo),
    "arrival": (lambda: Ranked(lambda request: request.arrival), lambda: Ranked(lambda request: request.arrival)),
    "slot": (Slotted, lambda: Ranked(lambda request: request.slot)),
}


class Server:
    """The queues, the memory, and the rules of moving between them."""

    def __init__(
        self,
        policy: Policy,
        blocks: int,
        block_size: int,
        host_blocks: int = 0,
        max_model_len: Optional[int] = None,
        max_generate_length: Optional[int] = None,
        refuses: Optional[bool] = None,
    ) -> None:
        self.policy = policy
        self.pool = BlockPool(blocks - policy.null_blocks if policy.paged else FOREVER, block_size, host_blocks)
        self.cohort = Cohort(block_size)
        rank = (lambda request: (policy.rank(request), request.arrival, request.serial)) if policy.ranked else None
        self.waiting = line(rank)
        running, prefilling = LINES[policy.running_order]
        self.running: Line = running()
        self.swapped = Fifo()
        self.prefilling: Line = prefilling()
        self.finished = Fifo()  # done, blocks not yet released
        if not policy.paged:
            max_generate_length = None  # llm-serving looks at it only with PagedAttention
        self.limits = Limits(self.pool, max_model_len, max_generate_length)
        self._longest = self.limits.longest
        self.refuses = policy.refuses if refuses is None else refuses
        self.view = View(
            self.waiting, self.running, self.swapped, self.prefilling, self.finished, self.pool, self.cohort,
            max_model_len,
        )  # fmt: skip
        self.view.memory = policy.begin()
        self.gaps = Gaps()
        self.done: list[Request] = []  # in the order they ended
        self.written = 0  # tokens of answers, over all requests: what counts as progress
        self.computed = 0  # prompt tokens run, those run again included
        self.recording = False  # whether somebody wants to know who took which place
        self._flushes = policy.flushes
        self._failing = False  # whether a call may fail because of some request, past or present
        self._cuts = max_generate_length is not None
        # waiting requests by arrival, where max_wait can change the order of the queue
        patient = policy.max_wait is None or not policy.ranked
        self._overdue: Optional[list[tuple[float, int, Request]]] = None if patient else []

    # -- arrivals ------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float, visible: float) -> None:
        """Put an arrival into waiting, or refuse it if it could never run; it has queued since it was visible."""
        request.visible = request.since = visible
        if request.prompt + request.end > self._longest:
            request.end = self.limits.last_token(request)
        if self.refuses and (reason := self.limits.misfit(request)):
            self._turn_away(request, now, "refused", reason)
            return
        if request.fails is not None:
            self._failing = True
        request.place = "waiting"
        self.waiting.push(request)
        if self._overdue is not None:
            heappush(self._overdue, (request.arrival, request.serial, request))

    def _wait(self, request: Request) -> None:
        request.place = "waiting"
        self.waiting.push(request)
        if self._overdue is not None:
            heappush(self._overdue, (request.arrival, request.serial, request))

    def promote(self, now: float) -> None:
        """Move to the front of a sorted queue who has waited for more than the policy's max_wait."""
        due = self.next_promotion()
        while due is not None and due <= now:
            assert self._overdue is not None and isinstance(self.waiting, Ranked)
            self.waiting.promote(heappop(self._overdue)[2])
            due = self.next_promotion()

    def next_promotion(self) -> Optional[float]:
        """Return when the next waiting request will have waited for max_wait."""
        overdue, patience = self._overdue, self.policy.max_wait
        if overdue is None or patience is None:
            return None
        while overdue and overdue[0][2].place != "waiting":
            heappop(overdue)
        return overdue[0][0] + patience if overdue else None

    # -- carrying out a plan -------------------------------------------------------------------------------------

    def begin(self, plan: Plan, now: float) -> Step:
        """Move what the plan moves, take its memory, and return the model call."""
        (release, evict, waiting, swap_in, fetch, admit, reject, chunks, decode, _, running,
         _, _, hold, _, _, memory) = plan  # fmt: skip
        step = Step(plan, now)
        if admit or evict or reject or swap_in or fetch or release or waiting is not None:
            self._move(plan, step, now)
        if chunks:
            self._start_all(chunks, step, now)
        if running is not None:
            self.running.reorder(running)
            self.prefilling.reorder([request for request in running if request._listed])
        if decode:
            self._decode(step)
            if not chunks:
                step.hold = hold
        elif len(step.chunks) < len(chunks):
            self._decode_some(plan, step)
        self.view.memory = memory
        return step

    def _move(self, plan: Plan, step: Step, now: float) -> None:
        step.moved = True
        for request in plan.release:
            self.finished.remove(request)
            self.pool.free += request._held
            request._held = 0
        for eviction in plan.evict:
            if self.recording:
                step.evicted = [*step.evicted, (eviction.request, eviction.how, eviction.request.slot)]
            step.swapped += self._evict(eviction, now)
        if plan.waiting is not None:
            self.waiting.reorder(plan.waiting)
        for request in plan.swap_in:
            step.swapped += self._swap_in(request, now)
        for request in plan.fetch:
            step.swapped += self._fetch(request, now)
        for request in plan.admit:
            self._admit(request, step, True)
        for rejection in plan.reject:
            self._reject(rejection, now)

    def _start_all(self, chunks: Sequence[Chunk], step: Step, now: float) -> None:
        """Run parts of prompts; a chunk of somebody who decodes already is none."""
        pool, mixed = self.pool, False
        for request, tokens, blocks in chunks:
            if request._cohort is not None:
                mixed = True
                continue
            cached = request._cached
            pending = request.prompt + request._written - cached
            assert 0 < tokens <= pending, f"a chunk of {tokens} of {request}"
            if request.place != "running":
                self._admit(request, step, tokens < pending)
            held = -(-(cached + tokens) // pool.size)
            if held < blocks:
                held = blocks
            if held > request._held:
                pool.free -= held - request._held
                request._held = held
            if not cached:
                request.queued += now - request.since
                if request.scheduled is None:
                    request.scheduled = now
        assert pool.free >= 0, "a plan may not take more blocks than are free"
        step.chunks = [chunk for chunk in chunks if chunk.request._cohort is None] if mixed else chunks

    def _decode(self, step: Step) -> None:
        """Let the whole cohort run."""
        cohort, pool = self.cohort, self.pool
        step.decoders, step.context = cohort.size, cohort.context
        pool.free -= cohort.phases[-cohort.ticks % cohort.block]
        assert pool.free >= 0, "a decode may not take more blocks than are free"

    def _decode_some(self, plan: Plan, step: Step) -> None:
        """Let those of the cohort run that the plan names."""
        named = {chunk.request for chunk in plan.chunks if chunk.request._cohort is not None}
        if len(named) < self.cohort.size:
            step.skipped = [r for r in self.running if r._cohort is not None and r not in named]
            for request in step.skipped:
                self.cohort.leave(request)
        self._decode(step)

    def _take(self, blocks: int) -> None:
        self.pool.free -= blocks
        assert self.pool.free >= 0, "a plan may not take more blocks than are free"

    def _admit(self, request: Request, step: Step, prefills_on: bool) -> None:
        """Give a place in running; who will still be prefilling after this step is listed among those."""
        (self.waiting if request.place == "waiting" else self.swapped).remove(request)
        request.place = "running"
        self.running.push(request)
        if prefills_on:
            self._list(request)
        if self.recording:
            step.admitted = [*step.admitted, (request, request.slot)]

    def _list(self, request: Request) -> None:
        self.prefilling.push(request)
        request._listed = True

    def _unlist(self, request: Request) -> None:
        self.prefilling.remove(request)
        request._listed = False

    def _evict(self, eviction: Eviction, now: float) -> int:
        """Take a request out of running, or the blocks of one that was kept; return how many blocks were copied."""
        request, how, to = eviction
        if request.place == "running":
            self._step_out(request)
        else:
            self.swapped.remove(request)
        if request._cached:  # it was still queued otherwise, and goes on being so
            request.since = now
        if how == "keep":
            self._requeue(request, "swapped")
            return 0
        if how == "swap":
            request.host = request._held
            self.pool.host_free -= request.host
            assert self.pool.host_free >= 0, "a plan may not swap out more than the host holds"
        else:
            request._cached = 0
            request.complete = False
        self.pool.free += request._held
        request._held = 0
        self._requeue(request, to)
        return request.host

    def _step_out(self, request: Request) -> None:
        request.complete = request._cohort is not None
        if request._cohort is not None:
            self.cohort.leave(request)
        else:
            self._unlist(request)
        self.running.remove(request)
        request.evictions += 1

    def _requeue(self, request: Request, to: str) -> None:
        if to == "swapped":
            request.place = "swapped"
            self.swapped.push(request)
        elif to == "front":
            request.place = "waiting"
            if self.policy.ranked:  # a sorted queue has no front but its first rank
                self._wait(request)
            else:
                self.waiting.push_front(request)
        else:
            self._wait(request)

    def _swap_in(self, request: Request, now: float) -> int:
        """Let a request back into running, its blocks copied from the host if they are there; return how many."""
        copied = self._fetch(request, now)
        self.swapped.remove(request)
        request.place = "running"
        self.running.push(request)
        if request.complete:
            self.cohort.join(request)
        else:
            self._list(request)
        return copied

    def _fetch(self, request: Request, now: float) -> int:
        """Copy a request's blocks back from the host; return how many."""
        copied = request.host
        if copied:
            self._take(copied)
            self.pool.host_free += copied
            request._held, request.host = copied, 0
            request.swapped += now - request.since
            request.since = now
        return copied

    def _reject(self, rejection: Rejection, now: float) -> None:
        request = rejection.request
        if request.place == "running":
            if request._cohort is not None:
                self.cohort.leave(request)
            else:
                self._unlist(request)
            self.running.remove(request)
        else:
            (self.waiting if request.place == "waiting" else self.swapped).remove(request)
        self.pool.free += request._held
        self.pool.host_free += request.host
        request._held = request.host = 0
        self._turn_away(request, now, rejection.outcome, rejection.reason)

    # -- booking what a call produced ----------------------------------------------------------------------------

    def end(self, step: Step, now: float) -> list[Request]:
        """Book a model call that ended now; return the requests that are over."""
        over = self.decoded(step.start, now, 1, now) if step.decoders else []
        if step.chunks:
            self._computed(step, now, over)
        if step.skipped:
            for request in step.skipped:
                self.cohort.join(request)
        return over

    def decoded(self, start: float, now: float, ticks: int, first: float) -> list[Request]:
        """Book so many tokens of all who decode, the first at one instant and the last now; return who is over."""
        cohort, seconds, seen = self.cohort, self.gaps.seconds, self.gaps.seen
        stayed = cohort.size
        if cohort.fresh:
            stayed -= len(cohort.fresh)
            for request in cohort.fresh:
                seconds.append(first - request.last_token)  # type: ignore[operator]
                seen.append(1)
        if stayed:
            seconds.append(first - cohort.last)  # type: ignore[operator]
            seen.append(stayed)
        self.written += cohort.size * ticks
        over = cohort.tick(ticks, now, now - start)
        if over:
            failed = self._failing and self._fail(over)
            for request in over:
                self._finish(request, now, failed)
        return over

    def _fail(self, over: list[Request]) -> bool:
        """Whether a decode failed: then every row of it is over."""
        if all(request.fails != request._written for request in over):
            return False
        over += self._let_go()
        return True

    def _let_go(self) -> list[Request]:
        """Take everybody out of the cohort who decoded in a call that failed."""
        rows = [request for request in self.running if request._cohort is not None]
        for request in rows:
            self.cohort.leave(request)
            request.last_token = self.cohort.last
        return rows

    def _computed(self, step: Step, now: float, over: list[Request]) -> None:
        """Book parts of prompts, and the first token of whose is complete."""
        seconds = now - step.start
        self.view.last_prefill = (step.start, now)
        failed = self._failing and self._fails(step, over)
        for request, tokens, _ in step.chunks:
            request._cached = cached = request._cached + tokens
            request.prefilling += seconds
            self.computed += tokens
            written = request._written
            if cached < request.prompt + written:
                continue
            if request.first_token is None:
                request.first_token = now
            else:
                self.gaps.add(now - request.last_token, 1)  # type: ignore[operator]
            request.last_token = now
            request._written = written = written + 1
            self.written += 1
            if request._listed:
                self._unlist(request)
            if written < request.end and not failed:
                self.cohort.join(request)
            elif not failed:
                self._finish(request, now, False)
                over.append(request)
        if failed:
            self._fail_rows(step, now, over)

    def _fails(self, step: Step, over: list[Request]) -> bool:
        """Whether a call with prompts fails: because of a row that decoded, or of one that gets its token."""
        return any(request.outcome == "failed" for request in over) or any(
            request.fails == request._written + 1 and tokens == request.pending for request, tokens, _ in step.chunks
        )

    def _fail_rows(self, step: Step, now: float, over: list[Request]) -> None:
        """End all whose prompts or tokens were in a call that failed."""
        prompts = [chunk.request for chunk in step.chunks]
        for request in prompts + (self._let_go() if step.decoders else []):
            if request._listed:
                self._unlist(request)
            self._finish(request, now, True)
            over.append(request)

    def _finish(self, request: Request, now: float, failed: bool) -> None:
        self.running.remove(request)
        if self._flushes:
            self.finished.push(request)
        else:
            self.pool.free += request._held
            request._held = 0
        request.outcome = "finished"
        if failed:
            request.outcome, request.reason = "failed", "the model call failed"
        elif self._cuts and self.limits.cut_off(request):
            request.outcome = "unanswered"
            request.reason = "stopped by max_generate_length, which its client is not told"
        request.place = "done"
        request.finish = request.seen = now
        self.done.append(request)

    def _turn_away(self, request: Request, now: float, outcome: str, reason: str) -> None:
        request.place = "done"
        request.outcome, request.reason = outcome, reason
        request.finish = request.seen = now
        self.done.append(request)

    # -- the books -----------------------------------------------------------------------------------------------

    def idle(self) -> bool:
        """Whether nobody is here."""
        return not (self.waiting or self.running or self.swapped)

    def present(self) -> list[Request]:
        """Return everybody who is here."""
        return [*self.running, *self.swapped, *self.waiting]

    def check(self) -> None:
        """Verify the books between two steps; an assertion names what is off."""
        pool, cohort = self.pool, self.cohort
        held = sum(r.blocks for r in self.running) + sum(r._held for r in (*self.finished, *self.swapped))
        assert pool.free + held == pool.total, f"{pool.free} free + {held} held != {pool.total} blocks"
        hosted = sum(request.host for request in self.swapped)
        assert pool.host_free + hosted == pool.host_total, "host blocks lost"
        decoding = [request for request in self.running if request.decodes]
        assert cohort.size == len(decoding) and cohort.context == sum(r.cached for r in decoding), "cohort books"
        assert cohort.need() == sum(pool.blocks(r.cached + 1) > r.blocks for r in decoding), "block phases"
        assert list(self.prefilling) == [request for request in self.running if not request.decodes], "prefilling"
        for place, queue in (("waiting", self.waiting), ("running", self.running), ("swapped", self.swapped)):
            assert all(request.place == place for request in queue), f"a stranger in {place}"
        for request in self.waiting:
            assert request.blocks == request.cached == request.host == 0, f"{request} waits with memory"
        for request in decoding:
            assert request.pending == 1 and request.blocks >= pool.blocks(request.cached), f"{request}"
        assert len(set(self.present())) == len(self.waiting) + len(self.running) + len(self.swapped), "in two queues"

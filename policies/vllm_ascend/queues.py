"""Schedulers of vllm-ascend that change the waiting queue of vLLM V1: short requests first, and batch jobs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Optional

from servesim.core import DECODE_UNTIL_FINISH, NO_HOLD, Chunk, Float0, Int0, Int1, Plan, Request, Stuck, View
from servesim.core.native import mypyc_attr
from servesim.policies.vllm_common import requests_in
from servesim.policies.vllm_v1.rules import VLLMRules
from servesim.policies.vllm_v1.step_pass import Pass

from .rules import AscendRules
from .v1 import AscendV1, with_state

IMMEDIATE, SHORT, LONG = range(3)  # lanes of the waiting queue


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class AscendQueue(AscendV1):
    """The rules that both schedulers share: vllm-ascend does not start them with priorities."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy != "fcfs":
            raise ValueError(f"policy: expected fcfs with this scheduler, got {self.policy!r}")

    @property
    def can_overlap(self) -> bool:
        return True


class Pin(NamedTuple):
    """Policy state: the head of this lane was tried last and could not run. It is the head until a request is added."""

    lane: int
    time: float  # a request that the scheduler has seen later was added


class PinPass(Pass):
    """One decision, and the pin after it."""

    def __init__(self, policy: AscendShortFirst, view: View, tokens: int, free: int) -> None:
        super().__init__(policy, view, tokens, free)
        self.short_first = policy
        self.pin: Optional[Pin] = view.state

    def spend(self, request: Request, computed: int, tokens: int) -> None:
        self.tokens -= tokens
        if request.status == "waiting":
            self.pin = None

    def state(self) -> Any:
        return None if self.preempt else self.pin  # a victim is added to the queue

    def candidates(self, chunks: Sequence[Chunk]) -> Iterator[Request]:
        policy, view = self.short_first, self.view
        lanes: tuple[list[Request], list[Request], list[Request]] = ([], [], [])
        for request in view.waiting:
            lanes[policy.lane(request)].append(request)
        immediate, short, long = lanes
        due = 0  # long requests that have waited for the limit
        if policy.long_max_wait_ms > 0 and short:
            wait = policy.long_max_wait_ms / 1000
            due = next((index for index, request in enumerate(long) if view.now - request.received < wait), len(long))
        order = [*immediate, *long[:due], *short, *long[due:]]
        pin = self.pin
        if pin is not None and lanes[pin.lane] and all(request.received <= pin.time for request in order):
            head = lanes[pin.lane][0]
            order.remove(head)
            order.insert(0, head)
        else:
            self.pin = None
        for request in order:
            if self.pin is None:  # a pinned head that is tried again keeps its pin: a held plan does not change it
                self.pin = Pin(policy.lane(request), view.now)
            yield request


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class AscendShortFirst(AscendQueue):
    """vllm-ascend since 0.24: short prompts first; a long one goes first when it has waited for a limit."""

    async_scheduling: bool = True  # decide a step while the last one runs
    threshold: Int0 = 256  # most prompt tokens of a short request
    long_max_wait_ms: Float0 = 0.0  # milliseconds after which a long request goes before short ones; 0: never

    def rules(self) -> VLLMRules:
        return AscendRules(self, "ShortRequestFirst of vllm-ascend 0.25.1rc1")

    def lane(self, request: Request) -> int:
        if request.preemptions or request.written:
            return IMMEDIATE
        return SHORT if request.prompt <= self.threshold else LONG

    def make_pass(self, view: View, tokens: int, free: int) -> Pass:
        return PinPass(self, view, tokens, free)


JOB_NAME: Final = re.compile(r"#job_name\[([^\[\]]+)\]#")  # in the id of a request
DEFAULT_JOB: Final = "__default__"  # of requests without such a name
COLD_REQUESTS: Final = 3  # of a job, before its predictions count
DEFAULT_PREDICTION: Final = 128  # output tokens
MOST_SAMPLES: Final = 10
WEIGHT: Final = 0.1  # of a new sample


def job_of(request: Request) -> str:
    """Return the name of a request's job."""
    found = JOB_NAME.search(request.id) if isinstance(request.id, str) and "#" in request.id else None
    return DEFAULT_JOB if found is None else found[1]


class JobsState(NamedTuple):
    """Policy state of the batch jobs."""

    outputs: dict[str, tuple[float, int]]  # job with outputs -> their average tokens, and how many it has counted
    counts: dict[str, int]  # job with waiting requests -> how many it has counted, at most COLD_REQUESTS
    cold: dict[str, dict[int, tuple[Request, ...]]]  # job -> prompt tokens -> requests that go before all others
    known: set[Request]  # waiting requests that are counted
    head: Optional[Request]  # tried, and could not run; it stays the head
    admitted: list[Request]  # their outputs will be counted


class JobPass(Pass):
    """One decision, and the jobs while it is made. They are read when they change or a request can be admitted."""

    def __init__(self, policy: AscendBatchJobs, view: View, tokens: int, free: int) -> None:
        super().__init__(policy, view, tokens, free)
        self.rules = policy
        self.is_open = False
        state: JobsState = view.state
        if len(state.known) != len(view.waiting) or len(state.admitted) != len(view.running):
            self.open()

    def open(self) -> None:
        """Read the jobs: count the outputs that have ended and the requests that have come since the last time."""
        state: JobsState = self.view.state
        self.is_open = True
        self.outputs, self.counts = dict(state.outputs), dict(state.counts)
        self.head = state.head
        self.cold = {job: dict(requests) for job, requests in state.cold.items()}
        cold = [request for same in state.cold.values() for requests in same.values() for request in requests]
        for request in cold:
            if request.status != "waiting":  # aborted
                self.remove_cold(request)
        if len(state.admitted) == len(self.view.running):  # no request has left
            self.admitted = list(state.admitted)
        else:
            self.learn(state.admitted)
            self.admitted = list(self.view.running)
        self.jobs: dict[str, list[Request]] = {job: [] for job in self.counts}
        new = []
        for request in self.view.waiting:
            if request in state.known:
                self.jobs[job_of(request)].append(request)
            else:
                new.append(request)
        for job in [job for job, requests in self.jobs.items() if not requests]:  # all aborted
            del self.jobs[job], self.counts[job]
        for request in new:
            self.count(job_of(request), request)
            self.jobs.setdefault(job_of(request), []).append(request)

    def learn(self, requests: Sequence[Request]) -> None:
        """Count the outputs of requests that have ended by themselves, also if they have the maximum length."""
        ended = [request for request in requests if request.has_stopped]
        if len(ended) > 1:
            ended.sort(key=lambda request: request.finish or 0.0)
        for request in ended:
            job = job_of(request)
            self.rules.require_room(job, self.outputs, request, request.finish or 0.0)
            average, samples = self.outputs.get(job, (0.0, 0))
            if samples < MOST_SAMPLES:
                average = WEIGHT * request.written + (1 - WEIGHT) * average if samples else float(request.written)
                self.outputs[job] = average, samples + 1

    def count(self, job: str, request: Request) -> None:
        """Count a new waiting request: the first ones of a job are cold."""
        self.rules.require_room(job, self.counts, request, self.view.now)
        self.counts.setdefault(job, 0)
        if self.counts[job] < COLD_REQUESTS:
            self.counts[job] += 1
            same = self.cold.setdefault(job, {})
            same[request.prompt] = (*same.get(request.prompt, ()), request)

    def spend(self, request: Request, computed: int, tokens: int) -> None:
        self.tokens -= tokens
        if request.status == "waiting":
            self.take(request)
        elif request.status == "done":
            why = "vllm-ascend raises an error: it admits its next request, whose client is gone"
            raise Stuck(why, requests_in(self.view), self.view.now)

    def take(self, request: Request) -> None:
        """Remove an admitted request from its job."""
        job = job_of(request)
        self.head = None
        self.admitted.append(request)
        self.jobs[job].remove(request)
        self.remove_cold(request)
        if not self.jobs[job]:
            del self.jobs[job], self.counts[job]

    def remove_cold(self, request: Request) -> None:
        """Remove a request that does not wait any more from the cold ones, if it is one."""
        job = job_of(request)
        same = self.cold.get(job, {})
        if request in same.get(request.prompt, ()):
            same[request.prompt] = tuple([other for other in same[request.prompt] if other is not request])
            if not same[request.prompt]:
                del same[request.prompt]
            if not same:
                del self.cold[job]

    def candidates(self, chunks: Sequence[Chunk]) -> Iterator[Request]:
        if not self.is_open:
            self.open()
        while self.jobs:
            tokens = self.available_tokens([chunk for chunk in chunks if chunk.request.status == "waiting"])
            if tokens <= 0:  # the engine takes the queue for empty
                return
            self.head = request = self.head or self.choose(tokens)
            yield request

    def blocks_wanted(self, request: Request, computed: int) -> int:
        """Return the blocks that a request wants in the next step, as the engine estimates them."""
        after, size = computed + self.rules.step_tokens(request, computed), self.view.pool.block_size
        tokens, room = self.rules.step_tokens(request, after), -after % size
        return -(-(tokens - room) // size) if tokens > room else 0

    def available_tokens(self, admitted: Sequence[Chunk]) -> int:
        """Return the tokens of the blocks that are free and not reserved for the next step."""
        reserve, most = self.rules.reserve_margin_blocks, self.rules.reserve_max_blocks
        size = self.view.pool.block_size
        for chunk in admitted:
            reserve += self.blocks_wanted(chunk.request, chunk.cached)
        for request in self.view.running:
            if reserve >= most:
                break
            computed = request.cached
            if computed < request.prompt:
                reserve += self.blocks_wanted(request, computed)
            elif (computed + 1) % size == 0:  # a decode, whose next token needs a block
                reserve += 1
        return (self.free - min(reserve, most)) * size

    def choose(self, tokens: int) -> Request:
        """Return the next request: of a cold job, else of the job that the predictions put first."""
        if self.cold:
            return next(iter(next(iter(self.cold.values())).values()))[0]
        job = self.first_job(tokens > self.rules.low_available_tokens_threshold)
        requests = self.jobs[job]
        fitting = [request for request in requests if request.prompt <= tokens]
        return max(fitting, key=lambda r: r.prompt) if fitting else min(requests, key=lambda r: r.prompt)

    def first_job(self, plenty: bool) -> str:
        """Return the job that goes first, if there is plenty of memory or not."""
        predicted = {job: self.prediction(job) for job in self.jobs}
        long = [job for job in predicted if predicted[job] > self.rules.short_decode_token_threshold]
        short = [job for job in predicted if job not in long]
        if long and short:
            return max(long if plenty else short, key=lambda job: predicted[job])
        choose = max if plenty else min
        return choose(predicted, key=lambda job: predicted[job])

    def prediction(self, job: str) -> int:
        average, samples = self.outputs.get(job, (0.0, 0))
        return int(average) if samples else DEFAULT_PREDICTION

    def state(self) -> Any:
        if not self.is_open:
            return self.view.state
        known = {request for requests in self.jobs.values() for request in requests}
        return JobsState(self.outputs, self.counts, self.cold, known, self.head, self.admitted)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class AscendBatchJobs(AscendQueue):
    """vllm-ascend since 0.25: batch jobs with long outputs first. A job is `#job_name[NAME]#` in the request id."""

    max_jobs: Int1 = 20  # most names of jobs
    reserve_margin_blocks: Int0 = 2  # blocks to keep free, more than the running requests want in the next step
    reserve_max_blocks: Int0 = 8  # most blocks to keep free
    low_available_tokens_threshold: Int0 = 4096  # with fewer tokens of free blocks, jobs with short outputs go first
    short_decode_token_threshold: Int0 = 32  # most predicted output tokens of a short job

    def rules(self) -> VLLMRules:
        return AscendRules(self, "BatchJobAwareScheduler of vllm-ascend 0.25.1rc1")

    def initial_state(self) -> Any:
        return JobsState({}, {}, {}, set(), None, [])

    def step_tokens(self, request: Request, computed: int) -> int:
        """Return the tokens that a request is expected to compute in a step."""
        return min(request.prompt - computed, self.max_num_batched_tokens) if computed < request.prompt else 1

    def require_room(self, job: str, jobs: Collection[str], request: Request, now: float) -> None:
        """Raise Stuck if a job of a request is one more than the engine keeps."""
        if job not in jobs and len(jobs) >= self.max_jobs:
            raise Stuck("vllm-ascend raises an error: more names of jobs than max_jobs", [request], now)

    def make_pass(self, view: View, tokens: int, free: int) -> Pass:
        return JobPass(self, view, tokens, free)

    def decide(self, view: View) -> Plan:
        plan = self.schedule(view, self.max_num_batched_tokens)
        if plan.state is None:  # no request waits, and none is partly computed
            if view.decoding and len(view.state.outputs) >= self.max_jobs:  # an output of one more job is an error
                return with_state(DECODE_UNTIL_FINISH, self.make_pass(view, 0, 0).state())
            return with_state(plan, view.state)
        if plan.preempt:
            jobs = set(plan.state.counts)
            for gone in plan.preempt:
                self.require_room(job_of(gone.request), jobs, gone.request, view.now)
                jobs.add(job_of(gone.request))
            plan = plan._replace(preempt=[gone._replace(queue="back") for gone in plan.preempt])
        if plan.hold.steps and len(view.running) < self.max_num_seqs:
            plan.hold = NO_HOLD  # the reserve may become smaller
        return plan

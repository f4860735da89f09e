"""Reference implementation of vLLM's schedulers, as simple as possible: every step visits every request.

It shares no code with the policies or the engine. Tests compare both on random scenarios.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass(eq=False)
class Job:
    """A request."""

    id: str
    arrival: int
    prompt: int
    output: int
    priority: int = 0
    generated: int = 0  # output tokens
    computed: int = 0  # tokens cached
    held: int = 0
    host_blocks: int = 0
    prefill: bool = True
    preemptions: int = 0
    first_token: Optional[int] = None
    finish: Optional[int] = None

    @property
    def length(self) -> int:
        return self.prompt + self.generated

    @property
    def remaining(self) -> int:
        return self.length - self.computed


@dataclass
class Engine:
    """Queues, KV blocks and the loop; subclasses schedule."""

    knobs: dict[str, Any]
    jobs: list[Job]
    cost: dict[str, int]
    now: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)
    swapped: list[Job] = field(default_factory=list)
    error: Optional[str] = None

    def __post_init__(self) -> None:
        self.total = self.free = self.knobs["num_blocks"]
        self.free_cpu = self.knobs.get("num_cpu_blocks", 0)
        self.block_size = self.knobs["block_size"]
        self.watermark = int(self.knobs.get("watermark", 0.01) * self.total)
        self.prev_time, self.prev_prompt, self.latency = 0, False, 0

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def run(self) -> None:
        arrivals = deque(sorted(self.jobs, key=lambda job: job.arrival))
        while (arrivals or self.waiting or self.running or self.swapped) and self.error is None:
            if not (self.waiting or self.running or self.swapped):
                self.now = max(self.now, arrivals[0].arrival)
            while arrivals and arrivals[0].arrival <= self.now:
                self.waiting.append(arrivals.popleft())
            self.batch: list[list[Any]] = []
            self.preempted: list[list[str]] = []
            self.swap_in: list[str] = []
            self.ignored: list[str] = []
            self.recomputed: list[str] = []
            self.copied = 0
            self.schedule()
            if self.error:
                return
            if not (self.batch or self.preempted or self.swap_in or self.ignored or self.recomputed):
                if not arrivals:
                    self.error = "stuck"
                    return
                self.now = max(self.now, arrivals[0].arrival)
                continue
            self.rows.append({
                "t": self.now, "sched": [[job.id, n, "P" if job.prefill else "D"] for job, n in self.batch],
                "preempted": self.preempted, "swap_in": self.swap_in, "ignored": self.ignored,
                "recomputed": self.recomputed, "free_gpu": self.free, "free_cpu": self.free_cpu,
                "waiting": [job.id for job in self.waiting], "running": [job.id for job in self.running],
                "swapped": [job.id for job in self.swapped],
            })  # fmt: skip
            if self.batch or self.copied:  # a step that only copies blocks takes time too
                self.execute()
            elif isinstance(self, V1):
                self.now += 1  # its loop pauses after a step without a batch; in the recordings for one tick
            if len(self.rows) > 4000:
                self.error = "endless"

    def execute(self) -> None:
        tokens = sum(n for job, n in self.batch if job.prefill)
        decodes = sum(1 for job, _ in self.batch if not job.prefill)
        cost = self.cost
        self.now += cost["c0"] + cost["per_prefill_token"] * tokens + cost["per_decode_seq"] * decodes
        self.now += cost["per_swap_block"] * self.copied
        for job, n in self.batch:
            job.computed += n
            if job.computed < job.length:
                continue
            job.generated += 1
            job.prefill = False
            if job.first_token is None:
                job.first_token = self.now
            if job.generated == job.output:
                job.finish = self.now
                self.running.remove(job)
                self.free += job.held
                job.held = 0

    def schedule(self) -> None:
        raise NotImplementedError


class V1(Engine):
    """V1's synchronous scheduler."""

    spares_first = True  # the watermark does not count if no request runs

    def victim(self) -> Job:
        """Return the request to preempt."""
        priority = self.knobs.get("policy") == "priority"
        return max(self.running, key=lambda j: (j.priority, j.arrival)) if priority else self.running[-1]

    def limit(self, job: Job, n: int) -> int:
        """Return how many of these tokens a request may compute; -1: the pass ends."""
        return n

    def schedule(self) -> None:
        knobs = self.knobs
        budget = knobs["max_num_batched_tokens"]
        single = len(self.running) + len(self.waiting) <= 1
        threshold = 0 if single else knobs.get("long_prefill_token_threshold", 0)
        priority = knobs.get("policy") == "priority"
        scheduled: dict[Job, int] = {}
        index, stop = 0, False
        while index < len(self.running) and budget > 0 and not stop:
            job = self.running[index]
            n = min(job.remaining, threshold) if threshold > 0 else job.remaining
            n = self.limit(job, min(n, budget, knobs["max_model_len"] - 1 - job.computed))
            if n == 0:
                index += 1
                continue
            if n < 0:
                break
            while self.blocks(job.computed + n) - job.held > self.free:
                victim = self.victim()
                self.running.remove(victim)
                if victim in scheduled:
                    budget += scheduled.pop(victim)
                    index -= 1
                self.drop(victim)
                self.waiting.appendleft(victim)
                if victim is job:
                    stop = True
                    break
            if stop:
                break
            self.take(job, n)
            scheduled[job] = n
            budget -= n
            index += 1
        if priority:
            self.waiting = deque(sorted(self.waiting, key=lambda j: (j.priority, j.arrival, j.id)))
        if not self.preempted:
            self.admit(scheduled, budget, threshold)
        for job, n in scheduled.items():  # the last token of a request that is computed again is a decode
            if n == job.remaining == 1 and job.computed >= job.prompt:
                job.prefill = False
        self.batch = [[job, n] for job, n in scheduled.items()]

    def drop(self, job: Job) -> None:
        self.free += job.held
        job.held = job.computed = 0
        job.prefill = True
        job.preemptions += 1
        self.preempted.append([job.id, "recompute"])

    def take(self, job: Job, n: int) -> None:
        need = max(0, self.blocks(job.computed + n) - job.held)
        job.held += need
        self.free -= need
        assert self.free >= 0

    def first_chunk(self, job: Job, n: int, budget: int) -> int:
        """Return how many of these tokens a waiting request computes; -1: it waits."""
        whole = not self.knobs["enable_chunked_prefill"]
        return -1 if whole and n > budget else self.limit(job, min(n, budget))

    def head(self) -> Optional[Job]:
        """Return the waiting request to try next; None: none starts."""
        return self.waiting[0]

    def admit(self, scheduled: dict[Job, int], budget: int, threshold: int) -> None:
        knobs = self.knobs
        while self.waiting and budget > 0 and len(self.running) < knobs["max_num_seqs"]:
            job = self.head()
            if job is None:
                break
            n = self.first_chunk(job, min(job.length, threshold) if threshold else job.length, budget)
            if n < 0:
                break
            spared = self.spares_first and not self.running
            watermark = 0 if spared else int(knobs.get("watermark", 0.0) * (self.total + 1))
            if knobs["scheduler_reserve_full_isl"] and self.blocks(job.length) + watermark > self.free:
                break
            if self.blocks(n) + watermark > self.free:
                break
            self.start(job)
            self.take(job, n)
            scheduled[job] = n
            budget -= n

    def start(self, job: Job) -> None:
        self.waiting.remove(job)
        self.running.append(job)

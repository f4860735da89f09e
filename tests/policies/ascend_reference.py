"""Reference implementation of schedulers of vllm-ascend and vllm-mindspore: every step visits every request."""

from __future__ import annotations

from collections import deque
from typing import Any, Optional

from .vllm_reference import V1, Job


class AscendScheduler(V1):
    """Whole prompts first. The queue `swapped` has the requests that wait for the second phase."""

    phase = "prefill"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.limit = self.knobs["max_num_seqs"]

    def schedule(self) -> None:
        scheduled: dict[Job, int] = {}
        self.start_phase()
        self.prefill(scheduled)
        if self.knobs.get("enable_pd_transfer") and self.phase == "decode":
            while self.swapped and len(self.running) < self.limit:
                self.running.append(self.swapped.pop(0))
        if not scheduled:
            self.decode(scheduled)
        self.batch = [[job, n] for job, n in scheduled.items()]

    def start_phase(self) -> None:
        if not self.knobs.get("enable_pd_transfer") or self.phase == "decode":
            return
        self.swapped.extend(job for job in self.running if job.generated)
        self.running = [job for job in self.running if not job.generated]
        if not self.waiting and not self.running:
            self.phase = "decode"
            self.limit = max(self.limit, self.knobs["decode_max_num_seqs"])

    def must_wait(self, n: int, budget: int, long_slots: float) -> bool:
        """Whether a prompt is skipped."""
        lacks = self.free - self.blocks(n) < 0.01 * (self.total + 1)
        return n > budget or lacks or (n > self.threshold() and not long_slots)

    def threshold(self) -> float:
        if self.knobs.get("max_long_partial_prefills") is None:
            return float("inf")
        return self.knobs["long_prefill_token_threshold"] or max(1, int(0.04 * self.knobs["max_model_len"]))

    def prefill(self, scheduled: dict[Job, int]) -> None:
        knobs, budget = self.knobs, self.knobs["max_num_batched_tokens"]
        slots = knobs.get("max_long_partial_prefills") or float("inf")
        skipped: list[Job] = []
        while self.waiting and budget > 0 and len(self.running) != self.limit:
            job = self.waiting.popleft()
            n = job.remaining
            if n > min(knobs["max_model_len"], knobs["max_num_batched_tokens"], self.block_size * (self.total + 1)):
                self.ignored.append(job.id)
            elif self.must_wait(n, budget, slots):
                skipped.append(job)
            elif self.blocks(job.length) > self.free:
                self.waiting.appendleft(job)
                break
            else:
                self.take(job, n)
                self.running.append(job)
                scheduled[job] = n
                budget -= n
                slots -= n > self.threshold()
        self.put_back(skipped)

    def put_back(self, skipped: list[Job]) -> None:
        self.waiting.extendleft(reversed(skipped))

    def decode(self, scheduled: dict[Job, int]) -> None:
        index = 0
        while index < len(self.running) and len(scheduled) < self.knobs["max_num_batched_tokens"]:
            job = self.running[index]
            while self.blocks(job.length) - job.held > self.free:
                if self.preempt(scheduled) is job:
                    return
            self.take(job, 1)
            scheduled[job] = 1
            index += 1

    def preempt(self, scheduled: dict[Job, int]) -> Job:
        victim = self.running.pop()
        self.drop(victim)
        self.waiting.appendleft(victim)
        return victim


class EnhancedScheduler(AscendScheduler):
    """vllm-mindspore: skipped requests in reverse order; priorities with their defect."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ids: set[str] = set()  # that the engine takes for scheduled
        self.late: list[Job] = []

    def schedule(self) -> None:
        if self.knobs["policy"] == "priority":
            self.waiting = deque(sorted(self.waiting, key=lambda job: (job.priority, job.arrival, job.id)))
        self.late = []
        scheduled: dict[Job, int] = {}
        self.prefill(scheduled)
        self.ids -= {job.id for job in scheduled}
        if not scheduled and not self.ids:
            self.decode(scheduled)
        if self.knobs["policy"] == "priority":
            self.waiting = deque(sorted(self.waiting, key=lambda job: (job.priority, job.arrival, job.id)))
        self.batch = [[job, n] for job, n in scheduled.items()]

    def must_wait(self, n: int, budget: int, long_slots: float) -> bool:
        return n > budget

    def put_back(self, skipped: list[Job]) -> None:
        self.waiting.extendleft(skipped)

    def preempt(self, scheduled: dict[Job, int]) -> Job:
        if self.knobs["policy"] == "fcfs":
            return super().preempt(scheduled)
        victim = max(self.running, key=lambda other: (other.priority, other.arrival))
        self.running.remove(victim)
        self.drop(victim)
        self.waiting.append(victim)
        if victim in scheduled:
            victim.prefill = False  # the worker still computes its token
            self.late.append(victim)
            self.ids.add(victim.id)
        return victim

    def execute(self) -> None:
        self.now += self.cost["per_decode_seq"] * len(self.late)
        self.batch = [row for row in self.batch if row[0] not in self.late]
        super().execute()
        for job in self.late:
            job.generated, job.computed, job.prefill = job.generated + 1, 1, True
            if job.generated == job.output:
                job.finish = self.now
                self.waiting.remove(job)


class ShortFirst(V1):
    """Three lanes; the lane of a head that was tried is pinned."""

    pinned: Optional[int] = None

    def schedule(self) -> None:
        for job in self.waiting:
            if not hasattr(job, "received"):
                job.received = self.now  # type: ignore[attr-defined]
                self.pinned = None
        super().schedule()
        if self.preempted:
            self.pinned = None

    def head(self) -> Job:
        lanes = self.lanes()
        self.pinned = self.choose(lanes) if self.pinned is None else self.pinned
        return lanes[self.pinned][0]

    def start(self, job: Job) -> None:
        super().start(job)
        self.pinned = None

    def lanes(self) -> list[list[Job]]:
        lanes: list[list[Job]] = [[], [], []]
        for job in self.waiting:
            short = job.prompt <= self.knobs["threshold"]
            lanes[0 if job.preemptions or job.generated else 1 if short else 2].append(job)
        return lanes

    def choose(self, lanes: list[list[Job]]) -> int:
        immediate, short, long = lanes
        wait = self.knobs["long_max_wait_ms"] / 1000
        head: Any = long[0] if long else None
        if immediate:
            return 0
        if short and head is not None and wait and self.now - head.received >= wait:
            return 2
        return 1 if short else 2


class DynamicBatch(V1):
    """The token budget comes from a table; decodes before unfinished prompts."""

    def schedule(self) -> None:
        self.running.sort(key=lambda job: job.computed < job.prompt)
        decoding = [job for job in self.running if job.computed >= job.prompt]
        most = self.knobs["max_num_batched_tokens"]
        self.knobs["max_num_batched_tokens"] = self.budget(decoding) or most
        super().schedule()
        self.knobs["max_num_batched_tokens"] = most

    def budget(self, decoding: list[Job]) -> int:
        limit, chunks = self.knobs["slo_limits_for_dynamic_batch"], dict[tuple[int, int], int]()
        for context, count, chunk, cost in self.knobs["profile_table"]:
            if cost <= limit:
                chunks[context, count] = max(chunk, chunks.get((context, count), 0))
        if not decoding:
            return 0
        mean = sum(job.length for job in decoding) / len(decoding)
        contexts, counts = (set(sorted({pair[index] for pair in chunks})) for index in range(2))  # noqa: C414 the order
        context = next((key for key in contexts if key >= mean), None)
        count = next((key for key in counts if key >= len(decoding)), None)
        return chunks.get((context, count), 0)  # type: ignore[arg-type]


class Recompute(V1):
    """A victim is handed back."""

    def victim(self) -> Job:
        return self.running[-1]

    def schedule(self) -> None:
        super().schedule()
        self.recomputed = [id for id, _ in self.preempted]
        for job in [job for job in self.waiting if job.id in self.recomputed]:
            self.waiting.remove(job)
            job.preemptions = 0
        self.preempted = []


class ProfilingChunk(V1):
    """A step has a time besides the tokens."""

    spares_first = False

    def first_chunk(self, job: Job, n: int, budget: int) -> int:
        n = self.limit(job, n)
        return -1 if not self.knobs["enable_chunked_prefill"] and n > budget else min(n, budget)

    def schedule(self) -> None:
        self.target = self.left = self.time(self.knobs["max_num_batched_tokens"]) or 1.0
        super().schedule()

    def time(self, tokens: int) -> float:
        return self.knobs["fitted_a"] * tokens**2 + self.knobs["fitted_b"] * tokens

    def limit(self, job: Job, n: int) -> int:
        if self.left <= 0:
            return -1
        if job.computed >= job.prompt:
            return n
        a, b = self.knobs["fitted_a"], 2 * self.knobs["fitted_a"] * job.computed + self.knobs["fitted_b"]
        if a:
            size = ((b * b + 4 * a * self.left) ** 0.5 - b) / (2 * a)
            base = self.knobs["max_num_batched_tokens"]
            chunk = max(int(base + self.knobs["smooth_factor"] * (size - base)), self.knobs["min_chunk"])
            multiple = max(self.block_size, 64)
            n = min(n, (chunk + multiple - 1) // multiple * multiple)
        elif self.left != self.target:
            return -1
        return n

    def take(self, job: Job, n: int) -> None:
        super().take(job, n)
        if job.computed < job.prompt:
            self.left -= self.time(job.computed + n) - self.time(job.computed)


class BatchJobs(V1):
    """Jobs with long outputs first, and blocks in reserve. The job of a request is in its id."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.names: dict[str, list[Job]] = {}  # waiting requests of every job
        self.cold: dict[str, dict[int, list[Job]]] = {}
        self.counted: dict[str, int] = {}
        self.samples: dict[str, list[int]] = {}
        self.seen: set[Job] = set()  # that wait and are counted
        self.first: Optional[Job] = None

    def name(self, job: Job) -> str:
        return job.id.partition("#job_name[")[2].partition("]")[0]

    def add(self, job: Job) -> None:
        name = self.name(job)
        self.seen.add(job)
        self.names.setdefault(name, []).append(job)
        if self.counted.setdefault(name, 0) < 3:
            self.counted[name] += 1
            self.cold.setdefault(name, {}).setdefault(job.prompt, []).append(job)

    def schedule(self) -> None:
        for job in self.waiting:
            if job not in self.seen:
                self.add(job)
        super().schedule()
        victims = [self.waiting.popleft() for _ in self.preempted][::-1]
        for job in victims:
            self.waiting.append(job)
            self.add(job)

    def execute(self) -> None:
        super().execute()
        for job, _ in self.batch:
            if job.finish is not None and self.knobs["stop_by_eos"]:
                self.samples.setdefault(self.name(job), []).append(job.generated)

    def head(self) -> Optional[Job]:
        wanted = sum(map(self.wanted, self.running)) + self.knobs["reserve_margin_blocks"]
        tokens = (self.free - min(wanted, self.knobs["reserve_max_blocks"])) * self.block_size
        if tokens > 0:
            self.first = self.first or self.choose(tokens)
        return self.first if tokens > 0 else None

    def start(self, job: Job) -> None:
        super().start(job)
        self.first = None
        self.seen.remove(job)
        for name, jobs in list(self.names.items()):
            if job in jobs:
                jobs.remove(job)
                same = self.cold.get(name, {})
                if job in same.get(job.prompt, []):
                    same[job.prompt].remove(job)
                    self.cold[name] = {prompt: rest for prompt, rest in same.items() if rest}
                    if not self.cold[name]:
                        del self.cold[name]
                if not jobs:
                    del self.names[name], self.counted[name]

    def wanted(self, job: Job) -> int:
        most, size = self.knobs["max_num_batched_tokens"], self.block_size
        after = job.computed + (min(job.prompt - job.computed, most) if job.computed < job.prompt else 1)
        tokens = min(job.prompt - after, most) if after < job.prompt else 1
        return self.blocks(max(0, tokens - (size - after % size if after % size else 0)))

    def choose(self, tokens: int) -> Job:
        for buckets in self.cold.values():
            return next(iter(buckets.values()))[0]
        plenty = tokens > self.knobs["low_available_tokens_threshold"]
        is_long = {name: self.predict(name) > self.knobs["short_decode_token_threshold"] for name in self.names}
        names = list(self.names)
        descending = plenty
        if len(set(is_long.values())) == 2:
            names, descending = [name for name in names if is_long[name] == plenty], True
        name = sorted(names, key=self.predict, reverse=descending)[0]
        jobs = self.names[name]
        fitting = [job for job in jobs if job.prompt <= tokens]
        return sorted(fitting, key=lambda job: -job.prompt)[0] if fitting else sorted(jobs, key=lambda j: j.prompt)[0]

    def predict(self, name: str) -> int:
        average: Optional[float] = None
        for sample in self.samples.get(name, [])[:10]:
            average = float(sample) if average is None else 0.1 * sample + 0.9 * average
        return 128 if average is None else int(average)

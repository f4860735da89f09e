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
                victim = self.running.pop()
                self.drop(victim)
                self.waiting.appendleft(victim)
                if victim is job:
                    return
            self.take(job, 1)
            scheduled[job] = 1
            index += 1

    def drop(self, job: Job) -> None:
        self.free += job.held
        job.held = job.computed = 0
        job.prefill = True
        job.preemptions += 1
        self.preempted.append([job.id, "recompute"])


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

    def decode(self, scheduled: dict[Job, int]) -> None:
        if self.knobs["policy"] == "fcfs":
            super().decode(scheduled)
            return
        index = 0
        while index < len(self.running) and len(scheduled) < self.knobs["max_num_batched_tokens"]:
            job = self.running[index]
            while self.blocks(job.length) - job.held > self.free:
                victim = max(self.running, key=lambda other: (other.priority, other.arrival))
                self.running.remove(victim)
                self.drop(victim)
                self.waiting.append(victim)
                if victim in scheduled:
                    victim.prefill = False  # the worker still computes its token
                    self.late.append(victim)
                    self.ids.add(victim.id)
                if victim is job:
                    return
            self.take(job, 1)
            scheduled[job] = 1
            index += 1

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

    def admit(self, scheduled: dict[Job, int], budget: int, threshold: int) -> None:
        knobs = self.knobs
        while self.waiting and budget > 0 and len(self.running) < knobs["max_num_seqs"]:
            lanes = self.lanes()
            self.pinned = self.choose(lanes) if self.pinned is None else self.pinned
            job = lanes[self.pinned][0]
            n = min(job.length, threshold) if threshold else job.length
            if not knobs["enable_chunked_prefill"] and n > budget:
                break
            n = min(n, budget)
            watermark = int(knobs.get("watermark", 0.0) * (self.total + 1)) if self.running else 0
            whole = knobs["scheduler_reserve_full_isl"]
            if self.blocks(job.length if whole else n) + watermark > self.free:
                break
            self.waiting.remove(job)
            self.pinned = None
            self.take(job, n)
            self.running.append(job)
            scheduled[job] = n
            budget -= n

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

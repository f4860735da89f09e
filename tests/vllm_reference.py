"""vLLM's schedulers told once more, as plainly as possible: a list of numbers a request, every request looked at.

Nothing here is shared with the policies or the engine: the two tellings are compared on random scenarios.
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
    gen: int = 0  # tokens written
    comp: int = 0  # tokens cached
    held: int = 0
    host: int = 0
    prefill: bool = True
    preemptions: int = 0
    first: Optional[int] = None
    end: Optional[int] = None

    @property
    def len(self) -> int:
        return self.prompt + self.gen

    @property
    def todo(self) -> int:
        return self.len - self.comp


@dataclass
class Engine:
    """Queues, memory, the loop; subclasses schedule."""

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
        self.bs = self.knobs["block_size"]
        self.wm = int(self.knobs.get("watermark", 0.01) * self.total)
        self.prev_time, self.prev_prompt, self.latency = 0, False, 0

    def nb(self, tokens: int) -> int:
        return -(-tokens // self.bs)

    def run(self) -> None:
        coming = deque(sorted(self.jobs, key=lambda job: job.arrival))
        while (coming or self.waiting or self.running or self.swapped) and self.error is None:
            if not (self.waiting or self.running or self.swapped):
                self.now = max(self.now, coming[0].arrival)
            while coming and coming[0].arrival <= self.now:
                self.waiting.append(coming.popleft())
            self.batch: list[list[Any]] = []
            self.preempted: list[list[str]] = []
            self.swap_in: list[str] = []
            self.ignored: list[str] = []
            self.copied = 0
            self.schedule()
            if self.error:
                return
            if not (self.batch or self.preempted or self.swap_in or self.ignored):
                if not coming:
                    self.error = "stuck"
                    return
                self.now = max(self.now, coming[0].arrival)
                continue
            self.rows.append({
                "t": self.now, "sched": [[job.id, n, "P" if job.prefill else "D"] for job, n in self.batch],
                "preempted": self.preempted, "swap_in": self.swap_in, "ignored": self.ignored,
                "free_gpu": self.free, "free_cpu": self.free_cpu,
                "waiting": [job.id for job in self.waiting], "running": [job.id for job in self.running],
                "swapped": [job.id for job in self.swapped],
            })  # fmt: skip
            if self.batch or self.copied:  # a step that only copies blocks takes its time as well
                self.execute()
            if len(self.rows) > 4000:
                self.error = "endless"

    def execute(self) -> None:
        tokens = sum(n for job, n in self.batch if job.prefill)
        decodes = sum(1 for job, _ in self.batch if not job.prefill)
        cost = self.cost
        self.now += cost["c0"] + cost["per_prefill_token"] * tokens + cost["per_decode_seq"] * decodes
        self.now += cost["per_swap_block"] * self.copied
        for job, n in self.batch:
            job.comp += n
            if job.comp < job.len:
                continue
            job.gen += 1
            job.prefill = False
            if job.first is None:
                job.first = self.now
            if job.gen == job.output:
                job.end = self.now
                self.running.remove(job)
                self.free += job.held
                job.held = 0

    def schedule(self) -> None:
        raise NotImplementedError

    # -- v0's parts ----------------------------------------------------------------------------------------------

    def gate(self, waiting: Any, running: Any) -> bool:
        if self.prev_prompt:
            self.latency = self.now - self.prev_time
        self.prev_time, self.prev_prompt = self.now, False
        factor = self.knobs.get("delay_factor", 0)
        if factor > 0 and waiting:
            return self.now - min(job.arrival for job in waiting) > factor * self.latency or not running
        return True

    def can_allocate(self, job: Job) -> str:
        need = self.nb(job.len)
        if self.total - need < self.wm:
            return "never"
        return "ok" if self.free - need >= self.wm else "later"

    def can_append(self, job: Job) -> bool:
        touched = self.knobs["append_rule"] == "touched"
        return self.free >= (0 if touched and job.prefill and job.len % self.bs == 0 else 1)

    def append(self, job: Job) -> None:
        more = max(0, self.nb(job.len) - job.held)
        job.held += more
        self.free -= more
        assert self.free >= 0

    def preempt(self, job: Job) -> str:
        job.preemptions += 1
        how = "swap" if self.knobs.get("preemption_mode") == "swap" else "recompute"
        if how == "swap":
            need = job.held if self.knobs["append_rule"] == "any_free" else self.nb(job.len)
            if need > self.free_cpu:
                self.error = "dead"
                return how
            job.host = job.held
            self.free_cpu -= job.host
            self.copied += job.host
        else:
            job.comp, job.prefill = 0, True
        self.free += job.held
        job.held = 0
        self.preempted.append([job.id, how])
        return how

    def running_pass(self, budget: Optional[int]) -> tuple[list[Any], list[Any], list[Job], list[Job], list[Job]]:
        queue = deque(self.running)
        if self.knobs["sort_running"]:
            queue = deque(sorted(queue, key=lambda job: job.arrival))
        decodes: list[Any] = []
        prompts: list[Any] = []
        recompute: list[Job] = []
        out: list[Job] = []
        while queue:
            job = queue[0]
            n = job.todo if budget is None else min(job.todo, budget)
            if n == 0:
                break
            queue.popleft()
            while not self.can_append(job):
                victim = queue.pop() if queue else job
                (recompute if self.preempt(victim) == "recompute" else out).append(victim)
                if victim is job or self.error:
                    break
            else:
                self.append(job)
                (prompts if job.prefill else decodes).append([job, n])
                if budget is not None:
                    budget -= n
        return decodes, prompts, list(queue), recompute, out

    def swap_pass(self, seqs: int, budget: int) -> list[Any]:
        if self.knobs["swap_order"] == "arrival":
            self.swapped.sort(key=lambda job: job.arrival)
        back: list[Any] = []
        while self.swapped:
            job = self.swapped[0]
            need = job.host + 1 if self.knobs["append_rule"] == "any_free" else (job.len - 1) // self.bs + 1
            if self.knobs.get("fail_infeasible", True) and self.total < need:
                self.ignored.append(job.id)
                self.swapped.pop(0)
                self.free_cpu += job.host
                continue
            if self.free - need < self.wm or seqs + 1 > self.knobs["max_num_seqs"] or job.todo > budget:
                break
            self.swapped.pop(0)
            seqs, budget = seqs + 1, budget - job.todo
            self.free -= job.host
            self.free_cpu += job.host
            self.copied += job.host
            job.held, job.host = job.host, 0
            self.append(job)
            self.swap_in.append(job.id)
            back.append([job, job.todo])
        return back


class V0(Engine):
    """The default scheduler."""

    def prefill_pass(self) -> list[Any]:
        knobs, scope = self.knobs, self.knobs["delay_scope"]
        frozen_waiting, frozen_running = list(self.waiting), list(self.running)
        budget = knobs["max_num_batched_tokens"]
        admitted: list[Any] = []
        while True:
            waiting = frozen_waiting if scope == "queue" else self.waiting
            running = frozen_running if scope != "request" else [*self.running, *admitted]
            if not self.gate(waiting, running) or not self.waiting:
                break
            job = self.waiting[0]
            if job.len > min(knobs["max_model_len"], budget) or self.can_allocate(job) == "never":
                self.ignored.append(self.waiting.popleft().id)
                continue
            if self.can_allocate(job) == "later":
                break
            lens = [n for _, n in admitted] + [job.len]
            padded = len(lens) * max(lens)
            if (padded if knobs.get("padded_prefill") else sum(lens)) > budget:
                break
            if len(self.running) + len(lens) > knobs["max_num_seqs"]:
                break
            if knobs.get("padded_prefill") and padded - sum(lens) > knobs["max_paddings"]:
                break
            self.waiting.popleft()
            self.append(job)
            admitted.append([job, job.len])
        if admitted or (self.ignored and knobs.get("ignored_step")):
            self.prev_prompt = True
        return admitted

    def schedule(self) -> None:
        admitted = [] if self.swapped else self.prefill_pass()
        if admitted or (self.ignored and self.knobs.get("ignored_step")):
            self.running += [job for job, _ in admitted]
            self.batch = admitted
            return
        if self.knobs.get("policy") == "priority":
            self.priority_pass()
        decodes, _, _, recompute, out = self.running_pass(None)
        left = self.knobs["max_num_batched_tokens"] - len(decodes)
        back = [] if recompute or out else self.swap_pass(len(decodes), left)
        self.running = [job for job, _ in decodes + back]
        self.waiting.extendleft(recompute)
        self.swapped += out
        self.batch = decodes + back
        if self.knobs["sort_running"]:  # the policies show the batch sorted already; the engine sorts before it is used
            self.running.sort(key=lambda job: job.arrival)

    def priority_pass(self) -> None:
        def key(job: Job) -> tuple[int, int]:
            return (job.priority, job.arrival)

        self.running.sort(key=key)
        if not self.waiting:
            return
        head = self.waiting.popleft()
        while self.running and key(self.running[-1]) > key(head):
            fits = self.can_allocate(head) == "ok" and head.len <= self.knobs["max_num_batched_tokens"]
            if fits and len(self.running) + 1 <= self.knobs["max_num_seqs"]:
                break
            victim = self.running.pop()
            mode, self.knobs["preemption_mode"] = self.knobs.get("preemption_mode"), None
            self.preempt(victim)
            self.knobs["preemption_mode"] = mode
            self.waiting.appendleft(victim)
        self.waiting.appendleft(head)
        self.waiting = deque(sorted(self.waiting, key=key))


class Chunked(Engine):
    """The scheduler with chunked prefill."""

    def schedule(self) -> None:
        knobs = self.knobs
        old_waiting, old_running = list(self.waiting), list(self.running)
        decodes, prompts, left, recompute, out = self.running_pass(knobs["max_num_batched_tokens"])
        tokens = knobs["max_num_batched_tokens"] - len(decodes) - sum(n for _, n in prompts)
        seqs = len(decodes) + len(prompts)
        back = [] if recompute or out else self.swap_pass(seqs, tokens)
        tokens, seqs = tokens - sum(n for _, n in back), seqs + len(back)
        fresh = self.prefill_pass(old_waiting, old_running, tokens, seqs)
        self.waiting.extendleft(recompute)
        self.swapped += out
        back_decodes = [part for part in back if not part[0].prefill]
        back_prompts = [part for part in back if part[0].prefill]
        self.batch = fresh + prompts + back_prompts + decodes + back_decodes
        if knobs["sort_running"]:
            order = fresh + decodes + prompts + back_decodes + back_prompts
            self.running = sorted(left + [job for job, _ in order], key=lambda job: job.arrival)
        else:
            ending = [part for part in prompts if part[1] == part[0].todo]
            others = [part for part in prompts if part[1] < part[0].todo]
            self.running = left + [j for j, _ in back_decodes + back_prompts + decodes + ending + others + fresh]

    def prefill_pass(self, old_waiting: list[Job], old_running: list[Job], tokens: int, seqs: int) -> list[Any]:
        fresh: list[Any] = []
        no_op = self.knobs["delay_scope"] != "queue"
        while (self.gate(old_waiting, [] if no_op else old_running)) and self.waiting:
            job = self.waiting[0]
            n = min(job.len, tokens)
            if n > self.knobs["max_model_len"] or self.can_allocate(job) == "never":
                self.ignored.append(self.waiting.popleft().id)
                continue
            if self.can_allocate(job) == "later" or n == 0 or seqs + 1 > self.knobs["max_num_seqs"]:
                break
            self.waiting.popleft()
            self.append(job)
            fresh.append([job, n])
            tokens, seqs = tokens - n, seqs + 1
        if fresh:
            self.prev_prompt = True
        return fresh


class V1(Engine):
    """V1's synchronous scheduler."""

    def schedule(self) -> None:
        knobs = self.knobs
        budget = knobs["max_num_batched_tokens"]
        alone = len(self.running) + len(self.waiting) <= 1
        threshold = 0 if alone else knobs.get("long_prefill_token_threshold", 0)
        priority = knobs.get("policy") == "priority"
        given: dict[Job, int] = {}
        index, stop = 0, False
        while index < len(self.running) and budget > 0 and not stop:
            job = self.running[index]
            n = min(job.todo, threshold) if threshold > 0 else job.todo
            n = min(n, budget, knobs["max_model_len"] - 1 - job.comp)
            if n == 0:
                index += 1
                continue
            while self.nb(job.comp + n) - job.held > self.free:
                victim = max(self.running, key=lambda j: (j.priority, j.arrival)) if priority else self.running[-1]
                self.running.remove(victim)
                if victim in given:
                    budget += given.pop(victim)
                    index -= 1
                self.free += victim.held
                victim.held = victim.comp = 0
                victim.prefill = True
                victim.preemptions += 1
                self.preempted.append([victim.id, "recompute"])
                self.waiting.appendleft(victim)
                if victim is job:
                    stop = True
                    break
            if stop:
                break
            self.take(job, n)
            given[job] = n
            budget -= n
            index += 1
        if priority:
            self.waiting = deque(sorted(self.waiting, key=lambda j: (j.priority, j.arrival, j.id)))
        if not self.preempted:
            self.admit(given, budget, threshold)
        self.batch = [[job, n] for job, n in given.items()]

    def take(self, job: Job, n: int) -> None:
        need = max(0, self.nb(job.comp + n) - job.held)
        job.held += need
        self.free -= need
        assert self.free >= 0

    def admit(self, given: dict[Job, int], budget: int, threshold: int) -> None:
        knobs = self.knobs
        while self.waiting and budget > 0 and len(self.running) < knobs["max_num_seqs"]:
            job = self.waiting[0]
            n = min(job.len, threshold) if threshold else job.len
            if not knobs["enable_chunked_prefill"] and n > budget:
                break
            n = min(n, budget)
            wm = int(knobs.get("watermark", 0.0) * (self.total + 1)) if self.running else 0
            if knobs["scheduler_reserve_full_isl"] and self.nb(job.len) + wm > self.free:
                break
            if self.nb(n) + wm > self.free:
                break
            self.waiting.popleft()
            self.take(job, n)
            self.running.append(job)
            given[job] = n
            budget -= n

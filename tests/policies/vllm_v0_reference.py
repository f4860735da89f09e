"""Reference implementation of vLLM v0's two schedulers: their common passes, then the order of the passes in each."""

from __future__ import annotations

from collections import deque
from typing import Any, Optional

from .vllm_reference import Engine, Job


class Passes(Engine):
    """The passes over the running and swapped queues, and the checks of free blocks."""

    def gate(self, waiting: Any, running: Any) -> bool:
        if self.prev_prompt:
            self.latency = self.now - self.prev_time
        self.prev_time, self.prev_prompt = self.now, False
        factor = self.knobs.get("delay_factor", 0)
        if factor > 0 and waiting:
            return self.now - min(job.arrival for job in waiting) > factor * self.latency or not running
        return True

    def can_allocate(self, job: Job) -> str:
        blocks = self.blocks(job.length)
        if self.total - blocks < self.watermark:
            return "never"
        return "ok" if self.free - blocks >= self.watermark else "later"

    def can_append(self, job: Job) -> bool:
        touched = self.knobs["append_rule"] == "touched"
        return self.free >= (0 if touched and job.prefill and job.length % self.block_size == 0 else 1)

    def append(self, job: Job) -> None:
        blocks = max(0, self.blocks(job.length) - job.held)
        job.held += blocks
        self.free -= blocks
        assert self.free >= 0

    def preempt(self, job: Job) -> str:
        job.preemptions += 1
        mode = "swap" if self.knobs.get("preemption_mode") == "swap" else "recompute"
        if mode == "swap":
            blocks = job.held if self.knobs["append_rule"] == "any_free" else self.blocks(job.length)
            if blocks > self.free_cpu:
                self.error = "dead"
                return mode
            job.host_blocks = job.held
            self.free_cpu -= job.host_blocks
            self.copied += job.host_blocks
        else:
            job.computed, job.prefill = 0, True
        self.free += job.held
        job.held = 0
        self.preempted.append([job.id, mode])
        return mode

    def running_pass(self, budget: Optional[int]) -> tuple[list[Any], list[Any], list[Job], list[Job], list[Job]]:
        queue = deque(self.running)
        if self.knobs["sort_running"]:
            queue = deque(sorted(queue, key=lambda job: job.arrival))
        decodes: list[Any] = []
        prompts: list[Any] = []
        recompute: list[Job] = []
        swapped_out: list[Job] = []
        while queue:
            job = queue[0]
            n = job.remaining if budget is None else min(job.remaining, budget)
            if n == 0:
                break
            queue.popleft()
            while not self.can_append(job):
                victim = queue.pop() if queue else job
                (recompute if self.preempt(victim) == "recompute" else swapped_out).append(victim)
                if victim is job or self.error:
                    break
            else:
                self.append(job)
                (prompts if job.prefill else decodes).append([job, n])
                if budget is not None:
                    budget -= n
        return decodes, prompts, list(queue), recompute, swapped_out

    def swap_pass(self, seqs: int, budget: int) -> list[Any]:
        if self.knobs["swap_order"] == "arrival":
            self.swapped.sort(key=lambda job: job.arrival)
        swapped_in: list[Any] = []
        while self.swapped:
            job = self.swapped[0]
            any_free = self.knobs["append_rule"] == "any_free"
            blocks = job.host_blocks + 1 if any_free else (job.length - 1) // self.block_size + 1
            if self.knobs.get("fail_infeasible", True) and self.total < blocks:
                self.ignored.append(job.id)
                self.swapped.pop(0)
                self.free_cpu += job.host_blocks if self.knobs.get("free_failed_swaps") else 0
                continue
            if self.free - blocks < self.watermark or seqs + 1 > self.knobs["max_num_seqs"] or job.remaining > budget:
                break
            self.swapped.pop(0)
            seqs, budget = seqs + 1, budget - job.remaining
            self.free -= job.host_blocks
            self.free_cpu += job.host_blocks
            self.copied += job.host_blocks
            job.held, job.host_blocks = job.host_blocks, 0
            self.append(job)
            self.swap_in.append(job.id)
            swapped_in.append([job, job.remaining])
        return swapped_in


class V0(Passes):
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
            if job.length > min(knobs["max_model_len"], budget) or self.can_allocate(job) == "never":
                self.ignored.append(self.waiting.popleft().id)
                continue
            if self.can_allocate(job) == "later":
                break
            lens = [n for _, n in admitted] + [job.length]
            padded = len(lens) * max(lens)
            if (padded if knobs.get("padded_prefill") else sum(lens)) > budget:
                break
            if len(self.running) + len(lens) > knobs["max_num_seqs"]:
                break
            if knobs.get("padded_prefill") and padded - sum(lens) > knobs["max_paddings"]:
                break
            self.waiting.popleft()
            self.append(job)
            admitted.append([job, job.length])
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
        decodes, _, _, recompute, swapped_out = self.running_pass(None)
        tokens = self.knobs["max_num_batched_tokens"] - len(decodes)
        swapped_in = [] if recompute or swapped_out else self.swap_pass(len(decodes), tokens)
        self.running = [job for job, _ in decodes + swapped_in]
        self.waiting.extendleft(recompute)
        self.swapped += swapped_out
        self.batch = decodes + swapped_in
        if self.knobs["sort_running"]:  # the policy returns a sorted batch; the engine sorts it before use
            self.running.sort(key=lambda job: job.arrival)

    def priority_pass(self) -> None:
        def key(job: Job) -> tuple[int, int]:
            return (job.priority, job.arrival)

        self.running.sort(key=key)
        if not self.waiting:
            return
        head = self.waiting.popleft()
        while self.running and key(self.running[-1]) > key(head):
            fits = self.can_allocate(head) == "ok" and head.length <= self.knobs["max_num_batched_tokens"]
            if fits and len(self.running) + 1 <= self.knobs["max_num_seqs"]:
                break
            victim = self.running.pop()
            mode, self.knobs["preemption_mode"] = self.knobs.get("preemption_mode"), None
            self.preempt(victim)
            self.knobs["preemption_mode"] = mode
            self.waiting.appendleft(victim)
        self.waiting.appendleft(head)
        self.waiting = deque(sorted(self.waiting, key=key))


class Chunked(Passes):
    """The scheduler with chunked prefill."""

    def schedule(self) -> None:
        knobs = self.knobs
        old_waiting, old_running = list(self.waiting), list(self.running)
        decodes, prompts, unscheduled, recompute, swapped_out = self.running_pass(knobs["max_num_batched_tokens"])
        tokens = knobs["max_num_batched_tokens"] - len(decodes) - sum(n for _, n in prompts)
        seqs = len(decodes) + len(prompts)
        swapped_in = [] if recompute or swapped_out else self.swap_pass(seqs, tokens)
        tokens, seqs = tokens - sum(n for _, n in swapped_in), seqs + len(swapped_in)
        admitted = self.prefill_pass(old_waiting, old_running, tokens, seqs)
        self.waiting.extendleft(recompute)
        self.swapped += swapped_out
        back_decodes = [chunk for chunk in swapped_in if not chunk[0].prefill]
        back_prompts = [chunk for chunk in swapped_in if chunk[0].prefill]
        self.batch = admitted + prompts + back_prompts + decodes + back_decodes
        if knobs["sort_running"]:
            order = admitted + decodes + prompts + back_decodes + back_prompts
            self.running = sorted(unscheduled + [job for job, _ in order], key=lambda job: job.arrival)
        else:
            ending = [chunk for chunk in prompts if chunk[1] == chunk[0].remaining]
            others = [chunk for chunk in prompts if chunk[1] < chunk[0].remaining]
            order = back_decodes + back_prompts + decodes + ending + others + admitted
            self.running = unscheduled + [job for job, _ in order]

    def prefill_pass(self, old_waiting: list[Job], old_running: list[Job], tokens: int, seqs: int) -> list[Any]:
        admitted: list[Any] = []
        no_op = self.knobs["delay_scope"] != "queue"
        closed = tokens == 0 and not self.knobs.get("examine_at_full_budget")
        while self.gate(old_waiting, [] if no_op else old_running) and self.waiting and not closed:
            job = self.waiting[0]
            n = min(job.length, tokens)
            if n > self.knobs["max_model_len"] or self.can_allocate(job) == "never":
                self.ignored.append(self.waiting.popleft().id)
                continue
            if self.can_allocate(job) == "later" or n == 0 or seqs + 1 > self.knobs["max_num_seqs"]:
                break
            self.waiting.popleft()
            self.append(job)
            admitted.append([job, n])
            tokens, seqs = tokens - n, seqs + 1
        if admitted:
            self.prev_prompt = True
        return admitted

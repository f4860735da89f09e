"""Reference implementation of vLLM V1 with its prefix cache, block by block and as simple as possible.

It shares no code with the engine or the policies: every token has an identity, every block a hash and a reference
count, and the free list is a list of blocks. Tests compare it with the recordings of the real engine and, on random
requests, with the simulation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass(eq=False)
class Block:
    """A KV block."""

    hash: Optional[int] = None
    refs: int = 0


@dataclass(eq=False)
class Job:
    """A request. `tokens` has its prompt and its whole answer."""

    id: str
    arrival: int
    prompt: int
    output: int
    priority: int
    tokens: list[Any]
    place: int = 0
    generated: int = 0
    computed: int = 0
    registered: int = 0
    blocks: list[Block] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    preemptions: int = 0
    cached: int = 0
    first_token: Optional[int] = None
    finish: Optional[int] = None

    @property
    def length(self) -> int:
        return self.prompt + self.generated


class Reference:
    """The scheduler, the block pool and the loop."""

    def __init__(
        self, knobs: dict[str, Any], cost: dict[str, int], jobs: list[Job], free_order: str = "hashed_last"
    ) -> None:
        self.knobs, self.cost, self.jobs = knobs, cost, jobs
        self.size: int = knobs["block_size"]
        self.free: list[Block] = [Block() for _ in range(knobs["num_blocks"])]  # front first
        self.map: dict[int, list[Block]] = {}
        self.names: dict[Any, int] = {}  # hash of (hash before it, tokens)
        self.free_order = free_order
        self.now = 0
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.rows: list[dict[str, Any]] = []
        self.evictions = 0
        self.stats = dict.fromkeys(
            ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits"), 0
        )
        self.error: Optional[str] = None
        for place, job in enumerate(jobs):
            job.place = place

    # -- blocks ----------------------------------------------------------------------------------------------------

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def hash_of(self, job: Job, index: int) -> int:
        while len(job.hashes) <= index:
            number = len(job.hashes)
            tokens = tuple(job.tokens[number * self.size : (number + 1) * self.size])
            key = (job.hashes[-1] if job.hashes else None, tokens)
            job.hashes.append(self.names.setdefault(key, len(self.names)))
        return job.hashes[index]

    def lookup(self, job: Job) -> list[Block]:
        found: list[Block] = []
        while len(found) < (job.length - 1) // self.size:
            blocks = self.map.get(self.hash_of(job, len(found)))
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def take(self, job: Job, count: int) -> None:
        for _ in range(count):
            block = self.free.pop(0)
            if block.hash is not None:
                self.map[block.hash].remove(block)
                if not self.map[block.hash]:
                    del self.map[block.hash]
                block.hash = None
                self.evictions += 1
            block.refs = 1
            job.blocks.append(block)

    def register(self, job: Job, tokens: int) -> None:
        for index in range(job.registered, tokens // self.size):
            block = job.blocks[index]
            block.hash = self.hash_of(job, index)
            self.map.setdefault(block.hash, []).append(block)
        job.registered = max(job.registered, tokens // self.size)

    def release(self, job: Job) -> None:
        front, back = [], []
        for block in reversed(job.blocks):
            block.refs -= 1
            if block.refs == 0:
                (back if block.hash is not None or self.free_order == "append" else front).append(block)
        self.free = front + self.free + back
        job.blocks = []
        job.registered = job.computed = 0

    # -- one step --------------------------------------------------------------------------------------------------

    def schedule(self) -> dict[str, Any]:
        knobs = self.knobs
        budget = knobs["max_num_batched_tokens"]
        cap = knobs.get("long_prefill_token_threshold", 0) if len(self.running) + len(self.waiting) > 1 else 0
        max_len = knobs.get("max_model_len") or 1 << 60
        scheduled: dict[Job, int] = {}
        preempted: list[Job] = []
        index = 0
        while index < len(self.running) and budget > 0:
            job = self.running[index]
            count = job.length - job.computed
            count = min(count, cap or count, budget, max_len - 1 - job.computed)
            if count <= 0:
                index += 1
                continue
            while self.blocks_for(job.computed + count) - len(job.blocks) > len(self.free):
                if knobs.get("policy") == "priority":
                    victim = max(self.running, key=lambda other: (other.priority, other.arrival))
                    if victim in scheduled:
                        budget += scheduled.pop(victim)
                        index -= 1
                else:
                    victim = self.running[-1]
                self.running.remove(victim)
                self.release(victim)
                victim.preemptions += 1
                preempted.append(victim)
                if victim is job:
                    break
            if preempted and preempted[-1] is job:
                break
            self.take(job, self.blocks_for(job.computed + count) - len(job.blocks))
            self.register(job, job.computed + count)
            scheduled[job] = count
            budget -= count
            index += 1
        for job in preempted:
            self.waiting.insert(0, job)
        if knobs.get("policy") == "priority":
            self.waiting.sort(key=lambda job: (job.priority, job.arrival, job.place))
        cached = [] if preempted else self.admit(scheduled, budget, cap)
        return {"scheduled": scheduled, "preempted": [job.id for job in preempted], "cached": cached}

    def admit(self, scheduled: dict[Job, int], budget: int, cap: int) -> list[list[Any]]:
        knobs, cached = self.knobs, []
        while self.waiting and budget > 0 and len(self.running) < knobs["max_num_seqs"]:
            job = self.waiting[0]
            hits = self.lookup(job)
            known = len(hits) * self.size
            count = job.length - known
            count = min(count, cap or count)
            if not knobs.get("chunked") and count > budget:
                break
            count = min(count, budget)
            usable = knobs["num_blocks"]
            reserve = int(knobs.get("v1_watermark", 0.0) * (usable + 1)) if self.running else 0
            idle = sum(block.refs == 0 for block in hits)
            whole = job.length if knobs.get("reserve_full_isl", True) else known + count
            if self.blocks_for(whole) - len(hits) + idle + reserve > len(self.free):
                break
            for block in hits:
                if block.refs == 0:
                    self.free.remove(block)
                block.refs += 1
            job.blocks = list(hits)
            job.registered, job.computed = len(hits), known
            self.take(job, self.blocks_for(known + count) - len(hits))
            self.register(job, known + count)
            self.waiting.pop(0)
            self.running.append(job)
            scheduled[job] = count
            budget -= count
            cached.append([job.id, known])
            job.cached += known
            prefix = "preempted_" if job.preemptions else ""
            self.stats[f"{prefix}requests"] += 1
            self.stats[f"{prefix}queries"] += job.length
            self.stats[f"{prefix}hits"] += known
        return cached

    def run(self, max_steps: int = 3000) -> None:
        """Run all requests. `error` says why the run ended early."""
        arrivals = deque(sorted(self.jobs, key=lambda job: job.arrival))
        while arrivals or self.waiting or self.running:
            if not (self.waiting or self.running):
                self.now = max(self.now, arrivals[0].arrival)
            while arrivals and arrivals[0].arrival <= self.now:
                self.waiting.append(arrivals.popleft())
            step = self.schedule()
            scheduled = step.pop("scheduled")
            if not scheduled and not step["preempted"]:
                if not arrivals:
                    self.error = "stuck"
                    return
                self.now = max(self.now, arrivals[0].arrival)
                continue
            kinds = {
                job: "D" if n == 1 and job.prompt <= job.computed == job.length - 1 else "P"
                for job, n in scheduled.items()
            }
            self.rows.append({
                "t": self.now, "sched": [[job.id, n, kinds[job]] for job, n in scheduled.items()], **step,
                "free_gpu": len(self.free), "hashes": len(self.map), "evictions": self.evictions,
                "free": [block.hash for block in self.free],
                "waiting": [job.id for job in self.waiting], "running": [job.id for job in self.running],
            })  # fmt: skip
            self.rows[-1]["finished"] = self.execute(scheduled, kinds) if scheduled else []
            if len(self.rows) > max_steps:
                self.error = "endless"
                return

    def execute(self, scheduled: dict[Job, int], kinds: dict[Job, str]) -> list[str]:
        """Run the model call. Return the ids of the requests that end."""
        cost, finished = self.cost, []
        self.now += cost["c0"]
        self.now += cost["per_prefill_token"] * sum(n for job, n in scheduled.items() if kinds[job] == "P")
        self.now += cost["per_decode_seq"] * sum(kind == "D" for kind in kinds.values())
        for job, count in scheduled.items():
            job.computed += count
            if job.computed < job.length:
                continue
            job.generated += 1
            if job.first_token is None:
                job.first_token = self.now
            if job.generated == job.output:
                job.finish = self.now
                finished.append(job.id)
                self.running.remove(job)
                self.release(job)
        return finished


def tokens_of(pieces: list[tuple[Any, int]], answer: Any, output: int) -> list[Any]:
    """Return the identity of every token of a prompt, which is pieces of named texts, and of its answer."""
    prompt = [(name, index) for name, count in pieces for index in range(count)]
    return prompt + [(answer, index) for index in range(output)]

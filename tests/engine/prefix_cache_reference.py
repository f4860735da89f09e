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
    limit: int = 0  # max_tokens; 0: the output
    generated: int = 0
    computed: int = 0
    unknown: int = 0  # tokens whose batch is out
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
        self, knobs: dict[str, Any], cost: dict[str, int], jobs: list[Job], old: bool = False, host_blocks: int = 0
    ) -> None:
        self.knobs, self.cost, self.jobs = knobs, cost, jobs
        self.host: dict[int, None] = {}  # hashes of the blocks in host memory, that of the least recent use first
        self.host_blocks = host_blocks
        self.evicted: list[int] = []  # hashes that leave the device in this step
        self.copied = 0  # blocks from the host, in this step
        self.all_copied = 0
        self.size: int = knobs["block_size"]
        self.free: list[Block] = [Block() for _ in range(knobs["num_blocks"])]  # front first
        self.map: dict[int, list[Block]] = {}
        self.names: dict[Any, int] = {}  # hash of (hash before it, tokens)
        self.old = old  # the rules of vLLM 0.23
        self.caches = knobs.get("enable_prefix_caching", True)
        self.now = self.device_free = 0
        self.out: deque[tuple[dict[str, Any], list[Job]]] = deque()  # batches on the device: row and jobs that sample
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
        while self.caches and len(found) < (job.length - 1) // self.size:
            blocks = self.map.get(self.hash_of(job, len(found)))
            if not blocks:
                break
            found.append(blocks[0])
        return found

    def lookup_host(self, job: Job, start: int) -> list[int]:
        hashes = [self.hash_of(job, index) for index in range(start, (job.length - 1) // self.size)]
        return hashes[: next((i for i, hash in enumerate(hashes) if hash not in self.host), len(hashes))]

    def use_host(self, hashes: list[int]) -> None:
        for hash in hashes:
            self.host.pop(hash, None)
            self.host[hash] = None
            if len(self.host) > self.host_blocks:
                del self.host[next(iter(self.host))]

    def take(self, job: Job, count: int) -> None:
        for _ in range(count):
            block = self.free.pop(0)
            if block.hash is not None:
                self.map[block.hash].remove(block)
                if not self.map[block.hash]:
                    del self.map[block.hash]
                self.evicted.append(block.hash)
                block.hash = None
                self.evictions += 1
            block.refs = 1
            job.blocks.append(block)

    def register(self, job: Job, tokens: int) -> None:
        if not self.caches:
            return
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
                (back if block.hash is not None or self.old else front).append(block)
        self.free = front + self.free + back
        job.blocks = []
        job.registered = job.computed = job.unknown = 0

    # -- one step --------------------------------------------------------------------------------------------------

    def schedule(self) -> dict[str, Any]:
        self.use_host(self.evicted)
        self.evicted, self.copied = [], 0
        knobs = self.knobs
        budget = knobs["max_num_batched_tokens"]
        capped = self.old or len(self.running) + len(self.waiting) > 1
        cap = knobs.get("long_prefill_token_threshold", 0) if capped else 0
        max_len = knobs.get("max_model_len") or 1 << 60
        scheduled: dict[Job, int] = {}
        preempted: list[Job] = []
        index = 0
        while index < len(self.running) and budget > 0:
            job = self.running[index]
            count = job.length + job.unknown - job.computed
            if job.unknown and job.computed + 2 - job.unknown >= job.prompt + (job.limit or job.output):
                count = 0  # its last token is on its way
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
            self.register(job, min(job.computed + count, job.length))
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
            on_host = self.lookup_host(job, len(hits))
            known = (len(hits) + len(on_host)) * self.size
            if self.old:
                self.count(job, known)
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
            self.use_host(on_host[::-1])
            self.copied += len(on_host)
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
            if not self.old:
                self.count(job, known)
        return cached

    def count(self, job: Job, known: int) -> None:
        if not self.caches:
            return
        prefix = "preempted_" if job.preemptions else ""
        self.stats[f"{prefix}requests"] += 1
        self.stats[f"{prefix}queries"] += job.length
        self.stats[f"{prefix}hits"] += known

    def run(self, max_steps: int = 3000) -> None:
        """Run all requests. `error` says why the run ended early."""
        self._run(max_steps)
        self.use_host(self.evicted)

    def _run(self, max_steps: int) -> None:
        arrivals = deque(sorted(self.jobs, key=lambda job: job.arrival))
        most_out = 2 if self.knobs.get("async_scheduling") else 1
        while arrivals or self.waiting or self.running or self.out:
            while arrivals and arrivals[0].arrival <= self.now:
                self.waiting.append(arrivals.popleft())
                if self.knobs.get("policy") == "priority":
                    self.waiting.sort(key=lambda job: (job.priority, job.arrival, job.place))
            step = self.schedule()
            scheduled = step.pop("scheduled")
            if scheduled or step["preempted"]:
                self.rows.append(self.launch(scheduled, step))
            if self.out and (len(self.out) == most_out or not scheduled):
                self.process()
            elif not scheduled and not step["preempted"]:
                if not arrivals:
                    self.error = "stuck" if self.waiting or self.running else None
                    return
                self.now = max(self.now, arrivals[0].arrival)
            elif not scheduled:
                self.now += 1  # after a step that only preempts, the engine waits for one tick
            if len(self.rows) > max_steps:
                self.error = "endless"
                return

    def launch(self, scheduled: dict[Job, int], step: dict[str, Any]) -> dict[str, Any]:
        """Send a batch to the device. Return the row of the step."""
        kinds = {
            job: "D" if n == 1 and job.prompt <= job.computed == job.length + job.unknown - 1 else "P"
            for job, n in scheduled.items()
        }
        row = {
            "t": self.now, "sched": [[job.id, n, kinds[job]] for job, n in scheduled.items()], **step,
            "free_gpu": len(self.free), "hashes": len(self.map), "evictions": self.evictions,
            "free": [block.hash for block in self.free],
            "waiting": [job.id for job in self.waiting], "running": [job.id for job in self.running],
            "finished": [], "start": self.now, "ret": None,
        }  # fmt: skip
        if scheduled:
            cost = self.cost
            self.all_copied += self.copied
            row["start"] = max(self.now, self.device_free)
            self.device_free = row["ret"] = (
                row["start"]
                + cost["c0"]
                + cost.get("per_copied_block", 0) * self.copied
                + cost["per_prefill_token"] * sum(n for job, n in scheduled.items() if kinds[job] == "P")
                + cost["per_decode_seq"] * sum(kind == "D" for kind in kinds.values())
            )
            sampled = []
            for job, count in scheduled.items():
                job.computed += count
                if job.computed == job.length + job.unknown:
                    job.unknown += 1
                    sampled.append(job)
            self.out.append((row, sampled))
        return row

    def process(self) -> None:
        """Wait for the oldest batch and process its tokens."""
        row, sampled = self.out.popleft()
        self.now = row["ret"]
        for job in sampled:
            if job.finish is not None:
                continue  # its stop token was in the batch before
            job.generated += 1
            if job.first_token is None:
                job.first_token = self.now
            if job in self.running:
                job.unknown -= 1
                self.register(job, job.computed - job.unknown)
            if job.generated == job.output:
                job.finish = self.now
                row["finished"].append(job.id)
                (self.running if job in self.running else self.waiting).remove(job)
                self.release(job)


def tokens_of(pieces: list[tuple[Any, int]], answer: Any, output: int) -> list[Any]:
    """Return the identity of every token of a prompt, which is pieces of named texts, and of its answer."""
    prompt = [(name, index) for name, count in pieces for index in range(count)]
    return prompt + [(answer, index) for index in range(output)]

"""SGLang's scheduler without a radix cache, restated step by step with plain lists.

It follows the description of the real engine and shares no code with the policy. Times are whole ticks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional


@dataclass(eq=False)
class Job:
    """One request. Its outputs are known to the scheduler when the results of a batch have been processed."""

    id: str
    arrival: int
    prompt: int
    output: int
    limit: int
    outs: int = 0
    prefix: int = 0  # tokens whose keys and values exist, of a prompt that was cut
    stored: int = 0  # tokens that have memory
    done: bool = False
    lost: bool = False  # retracted: the token in flight does not count
    first_token: Optional[int] = None
    finish: Optional[int] = None
    retractions: int = 0

    @property
    def rest(self) -> int:
        return self.prompt + self.outs - self.prefix


@dataclass(eq=False)
class Batch:
    """Requests, and the tokens of each prompt."""

    jobs: list[Job]
    prompts: dict[Job, int]
    cut: Optional[Job] = None  # its prompt continues
    decodes: int = 0


class Crash(Exception):
    """The engine raises an error."""


class Engine:
    """One server. `knobs` are those of a recording; `rows` are its steps."""

    has_tree = False

    def __init__(self, version: str, knobs: dict[str, Any], jobs: list[Job], cost: dict[str, int]) -> None:
        self.old = version.endswith("0.4.6")
        self.knobs, self.cost, self.jobs = knobs, cost, sorted(jobs, key=lambda job: job.arrival)
        self.page = knobs.get("page_size", 1)
        self.pages = knobs["max_total_num_tokens"] // self.page
        self.total = self.pages * self.page
        self.context = knobs["context_len"]
        self.overlap = knobs.get("overlap", False)
        self.init = min(0.7 * knobs.get("schedule_conservativeness", 1.0), 1.0)
        self.least = 0.14 * self.init
        self.ratio = self.init
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.full = False
        self.chunked: Optional[Job] = None
        self.last: Optional[Batch] = None
        self.rows: list[dict[str, Any]] = []
        self.retracted: list[Job] = []
        self.error: Optional[str] = None
        for job in self.jobs:
            room = min(self.context - 1, self.total - 1) - job.prompt - 1
            if not self.old:
                room = min(room, self.total - self.ceil(job.prompt) - self.page - 1)
            job.limit = min(job.limit, room)
            job.output = min(job.output, job.limit)

    # -- memory ---------------------------------------------------------------------------------------------------

    def ceil(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page

    @property
    def free(self) -> int:
        return self.pages * self.page

    @property
    def available(self) -> int:
        return self.free

    def store(self, job: Job, tokens: int, phase: str) -> None:
        self.pages -= (self.ceil(job.stored + tokens) - self.ceil(job.stored)) // self.page
        job.stored += tokens
        if self.pages < 0:
            raise Crash(f"{phase} out of memory")

    def release(self, job: Job, tokens: int) -> None:
        """Free all of a request, except what it stores beyond this number of tokens in pages of their own."""
        self.pages += self.ceil(min(job.stored, tokens)) // self.page
        job.stored = max(0, self.ceil(job.stored) - self.ceil(min(job.stored, tokens)))

    # -- loops ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            (self.run_overlap if self.overlap else self.run_normal)()
        except Crash as crash:
            self.error = str(crash)

    def receive(self, now: int) -> None:
        while self.jobs and self.jobs[0].arrival <= now:
            self.waiting.append(self.jobs.pop(0))

    def duration(self, batch: Batch) -> int:
        tokens = sum(batch.prompts.values())
        return self.cost["c0"] + self.cost["per_prefill_token"] * tokens + self.cost["per_decode_seq"] * batch.decodes

    def idle(self) -> None:
        if self.old or not (self.waiting or self.running or self.chunked):
            self.ratio = self.init

    def state(self) -> tuple[Any, ...]:
        return self.ratio, self.full, len(self.running), len(self.waiting), self.chunked

    def run_normal(self) -> None:
        now = 0
        while True:
            self.receive(now)
            before = self.state()
            batch = self.choose()
            if batch is not None:
                self.write(batch, now, None)
                now += self.duration(batch)
                self.process(batch, now)
            else:
                self.idle()
            self.last = batch
            if batch is None and self.state() == before:
                if not self.jobs:
                    break
                now = max(now, self.jobs[0].arrival)
        if self.waiting:
            self.error = "stands still"

    def run_overlap(self) -> None:
        now = end = 0  # end: of the last batch on the device
        while True:
            self.receive(now)
            before = self.state()
            batch, last = self.choose(), self.last
            start, last_end = max(now, end), end
            if batch is not None:
                self.write(batch, now, start)
                end = start + self.duration(batch)
            if last is not None:
                now = last_end
                self.process(last, now)
            elif batch is None:
                self.idle()
            self.last = batch
            if batch is None and last is None and self.state() == before:
                if not self.jobs:
                    break
                now = max(now, self.jobs[0].arrival)
        if self.waiting:
            self.error = "stands still"

    def write(self, batch: Batch, now: int, start: Optional[int]) -> None:
        row: dict[str, Any] = {
            "t": now,
            "sched": [
                [job.id, batch.prompts.get(job, 1), "P" if job in batch.prompts else "D"] for job in batch.jobs
            ],
            "free_after": self.pages,
            "new_token_ratio": self.ratio,
        }  # fmt: skip
        if start is not None:
            row["start"] = start
        if self.retracted:
            row["preempted"] = [job.id for job in self.retracted]
        self.retracted = []
        self.rows.append(row)

    def process(self, batch: Batch, now: int) -> None:
        """Process the results of a batch."""
        for job in batch.jobs:
            if job is batch.cut or job.lost:
                continue
            if job.done:  # it ended one batch earlier
                if self.old:
                    self.pages += self.ceil(job.stored) // self.page
                    job.stored = 0
                continue
            job.outs += 1
            if job.first_token is None:
                job.first_token = now
            if job.outs == job.output:
                job.done, job.finish = True, now
                self.finish(job)
            elif job in batch.prompts:
                self.unfinished(job)

    def finish(self, job: Job) -> None:
        self.release(job, job.prompt + job.outs - 1 if self.old else job.stored)

    # What sglang_radix_reference.py does for its tree, nothing here.

    def room(self, tokens: int) -> None:
        """Evict, if fewer tokens than these are free."""

    def unfinished(self, job: Job) -> None:
        """Keep the computed tokens of a prompt."""

    def look_up(self, job: Job) -> None:
        """Find the tokens that a waiting request need not compute."""

    def lock(self, job: Job, change: int) -> None:
        """Keep the tokens that were found, or no longer."""

    def use(self, job: Job) -> None:
        """Begin with the tokens that were found."""

    # -- one turn -------------------------------------------------------------------------------------------------

    def choose(self) -> Optional[Batch]:
        last = self.last
        for job in self.running:
            job.lost = False
        if last is not None and last.prompts:
            left = [job for job in last.jobs if job is not last.cut]
            if last.cut is not None:
                self.full = False
            kept = [job for job in left if not job.done]
            if len(kept) < len(left):
                self.full = False
            if kept and not self.running:
                self.running, self.full = kept, False
            else:
                self.running = self.running + kept
        return self.prefill() or self.decode()

    def max_rows(self) -> int:
        given = self.knobs.get("max_running_requests")
        estimate = min(max(int(self.total / self.context * 512), 2048), 4096)
        if self.old:
            return given or min(self.total // 2, estimate + 1)
        return min(given or estimate, self.total // 2)

    def prefill(self) -> Optional[Batch]:
        if (self.full or not self.waiting) and self.chunked is None:
            return None
        rows, listed = self.max_rows(), len(self.running)
        if listed >= rows and (self.old or self.chunked is None):
            self.full = True
            return None
        known = self.order() and self.old
        adder = Adder(self)
        if self.chunked is not None:
            adder.add_chunked(self.chunked)
            self.chunked = adder.cut
        new_rows = rows - listed
        if not self.old:
            used = len([job for job in self.running if not job.done]) + (adder.first is not None)
            new_rows = min(new_rows, rows - used)
        for job in self.waiting:
            if len(adder.tokens) >= new_rows or (self.full and not self.old):
                self.full = True
                break
            if not known:
                self.look_up(job)
            result = adder.add(job)
            if result != "continue":
                self.full = self.full or result == "no token"
                break
        if not adder.tokens:
            return None
        self.waiting = [job for job in self.waiting if job not in adder.tokens]
        self.chunked = adder.cut
        return self.start_prefill(adder)

    def order(self) -> bool:
        """Sort the waiting queue. Return whether this has looked up all requests."""
        if self.knobs.get("schedule_policy") == "lof":
            self.waiting.sort(key=lambda job: -job.limit)
        return False

    def start_prefill(self, adder: Adder) -> Batch:
        batch = Batch(list(adder.tokens), adder.tokens, adder.cut)
        self.room(sum(adder.tokens.values()) + (len(adder.tokens) * self.page if self.page > 1 else 0))
        for job, tokens in adder.tokens.items():
            job.lost = False
            self.store(job, tokens, "Prefill")
            job.prefix += tokens
        if self.knobs.get("enable_mixed_chunk"):
            decoding = [job for job in self.running if not job.done]
            self.room(len(decoding) * self.page)
            for job in decoding:
                self.store(job, 1, "Decode")
            batch.jobs += decoding
            batch.decodes = len(decoding)
            self.running = []
        return batch

    def decode(self) -> Optional[Batch]:
        before = len(self.running)
        if not before:
            return None
        self.running = [job for job in self.running if not job.done]
        if not self.running:
            self.full = False
            return None
        if self.fits(self.running):
            self.ratio = max(self.ratio - (self.init - self.least) / 600, self.least)
        else:
            self.retract()
        if len(self.running) < before:
            self.full = False
        self.room(len(self.running) * self.page)
        for job in self.running:
            self.store(job, 1, "Decode")
        return Batch(list(self.running), {}, decodes=len(self.running))

    def need(self, jobs: list[Job]) -> int:
        """Return the pages that the next decode of some requests needs, as the engine computes it."""
        if self.old:
            return sum((job.prompt + job.outs) % self.page == 0 for job in jobs)
        return sum(job.stored % self.page == 0 for job in jobs)

    def fits(self, jobs: list[Job]) -> bool:
        self.room(self.need(jobs) * self.page)
        return self.need(jobs) <= self.pages

    def retract(self) -> None:
        kept = sorted(self.running, key=lambda job: (job.outs, -job.prompt), reverse=True)
        while len(kept) > 1:
            if self.retracted and (self.free >= 20 * len(kept) if self.old else self.fits(kept)):
                break
            job = kept.pop()
            self.take_back(job, len(kept))
            job.prefix, job.lost = 0, True
            job.retractions += 1
            self.retracted.append(job)
            self.waiting.append(job)
        self.running = kept
        limits = sum(job.limit for job in kept) + (not self.old)
        self.ratio = min(1.0, (sum(job.outs for job in kept) + 20 * len(kept)) / limits)

    def take_back(self, job: Job, others: int) -> None:
        """Free the memory of a retracted request."""
        self.release(job, job.stored)


class Adder:
    """The budgets of one prefill."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.old = engine, engine.old
        knobs, jobs = engine.knobs, engine.running
        mixed = len(jobs) if knobs.get("enable_mixed_chunk") else 0
        self.tokens: dict[Job, int] = {}
        self.cut: Optional[Job] = None
        self.first: Optional[Job] = None  # the prompt that was cut before
        self.rem_input = knobs.get("max_prefill_tokens", 16384) - mixed
        self.rem_chunk = None if knobs["chunked_prefill_size"] is None else knobs["chunked_prefill_size"] - mixed
        total = 0.0
        for job in jobs:
            total += min(job.limit - job.outs, 4096) * engine.ratio
        self.total_off = mixed + total
        self.now_off = mixed
        self.states: Optional[list[tuple[int, int]]] = None

    @property
    def rem_total(self) -> float:
        return self.engine.available - self.total_off

    @property
    def rem_now(self) -> int:
        return self.engine.available - self.now_off

    def book(self, job: Job, tokens: int) -> None:
        self.tokens[job] = tokens
        promise = min(job.limit, 4096)
        if tokens < job.rest:
            self.cut, promise = job, 0
        if not self.old:
            tokens = self.engine.ceil(tokens)
        page = 0 if self.old else self.engine.page
        self.total_off += tokens + promise + page
        self.now_off += tokens + page
        self.rem_input -= tokens
        if self.rem_chunk is not None:
            self.rem_chunk -= tokens

    def add_chunked(self, job: Job) -> None:
        assert self.rem_chunk is not None
        room = self.rem_chunk
        if not self.old:
            room = min(room, int(self.rem_total))
            if room <= 0:
                room = self.rem_chunk
        self.first = job
        self.book(job, min(job.rest, room))

    def add(self, job: Job) -> str:
        if self.engine.knobs.get("ignore_eos") and not self.engine.has_tree:
            return self.add_ignore_eos(job)
        rest, page = job.rest, self.engine.page
        if self.old:
            total, rounded = rest + min(job.limit, 4096), rest
        else:
            total, rounded = rest + min(max(job.limit - job.outs, 0), 4096) + page, self.engine.ceil(rest)
        if total >= self.rem_total:
            return "no token"
        if self.old and rest > self.rem_input and self.tokens:
            return "other"
        if not self.old and self.rem_chunk is None and rounded >= self.rem_input and self.tokens:
            return "other"
        self.engine.lock(job, 1)
        tokens, refused = rest, ""
        if total > self.rem_total or (not self.old and total == self.rem_total):  # less is available than before
            refused = "no token"
        elif self.rem_chunk is not None and rounded > self.rem_chunk:
            tokens = self.rem_chunk if self.old else self.rem_chunk // page * page
            refused = "" if tokens > 0 else "other"
        if refused:
            self.engine.lock(job, -1)
            return refused
        self.engine.use(job)
        self.book(job, tokens)
        return self.result()

    def result(self) -> str:
        if self.rem_total <= 0 or self.rem_now <= 0:
            return "no token"
        if self.rem_input <= 0 or (self.rem_chunk is not None and self.rem_chunk <= 0):
            return "other"
        return "continue"

    def add_ignore_eos(self, job: Job) -> str:
        rounded = self.engine.ceil(job.rest)
        if not self.old and rounded > min(self.rem_now, self.rem_total):
            return "no token"
        self.note(job)
        room = self.rem_now - (job.prompt if self.old else rounded)
        freed = 0
        for index, (left, held) in enumerate(self.states):
            count = len(self.states) - index
            if self.old:
                steps = self.states[index + 1][0] if index + 1 < len(self.states) else left
                if room + freed - steps * count <= 0:
                    return "no token"
            elif room + freed - left * count <= count:
                return "no token"
            freed += held
        if self.rem_chunk is None or job.rest <= self.rem_chunk:
            self.book(job, job.rest)
        elif self.rem_chunk <= 0:
            return "other"
        else:
            self.book(job, self.rem_chunk)
        return self.result()

    def note(self, job: Job) -> None:
        entry = (job.limit - job.outs, job.prompt + job.outs)
        if self.states is None:
            jobs = [job, *self.engine.running, *self.tokens]
            states = [(other.limit - other.outs, other.prompt + other.outs) for other in jobs]
            self.states = sorted([state for state in states if state[0] > 0], key=lambda state: state[0])
            return
        for index, (left, _) in enumerate(self.states):
            if left >= entry[0]:
                self.states.insert(index, entry)
                return
        self.states.insert(len(self.states) - 1, entry)

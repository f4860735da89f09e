"""A plain restatement of the scheduler of MindIE-LLM 3.0.0, round by round, in whole microseconds.

Written from the rules of the engine, without the code of servesim: the policy must agree with it on random requests.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Optional

SHIPPED = {
    "cacheBlockSize": 128, "maxBatchSize": 200, "maxPrefillBatchSize": 50, "maxPrefillTokens": 8192,
    "supportSelectBatch": False, "stageSelectPolicy": 0, "prefillTimeMsPerReq": 150, "decodeTimeMsPerReq": 50,
    "maxPreemptCount": 0, "maxQueueDelayMicroseconds": 5000, "maxFirstTokenWaitTime": 2500, "prefillChunkSize": 0,
    "longPrefillTokenThreshold": 1024, "maxLongPartialPrefills": 8, "prefillExpectedTime": 1500,
    "decodeExpectedTime": 50, "dynamicBatchSizeEnable": False, "maxSeqLen": 2560, "npuBlockNum": 1000,
    "cpuBlockNum": 0, "activateAsyncInference": False, "enableChunkedPrefill": False,
}  # fmt: skip
IDLE_POLL = 1000
UNSIGNED = 1 << 64


def single(number: float) -> float:
    """Round to single precision."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


class EngineDied(Exception):
    """The scheduler thread ended with an exception."""


@dataclass(eq=False)
class Sequence:
    """One request."""

    id: Any
    number: int  # order of arrival
    arrival: int
    prompt: int
    output: int
    tokens: int = 0  # known output tokens
    places: int = 0  # tokens that were dispatched and have not come back
    come: int = 0  # tokens that have come back while it had lost their places
    computed: int = 0
    decodes: bool = False  # its prompt is computed
    blocks: int = 0
    host_blocks: int = 0
    finished: bool = False
    first: Optional[int] = None
    end: Optional[int] = None
    last: int = 0  # time of its newest result
    preemptions: int = 0
    resumed: int = 0  # outputs that became part of the prompt (SplitFuse)

    @property
    def length(self) -> int:
        return self.prompt + self.tokens + self.places


@dataclass
class Batch:
    """What one round dispatched."""

    time: int
    rows: list[tuple[Sequence, int, bool, bool]] = field(default_factory=list)  # tokens, is prefill, gives a token
    start: int = 0
    end: int = 0


class Fit:
    """The latency predictor with its defect."""

    def __init__(self) -> None:
        self.slope, self.intercept = 0.1317, 25.797
        self.decode = (0.2181, 0.0, 29.961)
        self.number = 0
        self.stored: dict[int, tuple[bool, int, int, int]] = {}
        self.points = self.x = self.y = self.xx = self.xy = 0.0
        self.decodes: deque[tuple[int, int, int]] = deque(maxlen=1000)
        self.decode_count = 0

    def round(self, is_prefill: bool, tokens: int, rows: int, blocks: int) -> None:
        self.number += 1
        self.stored.setdefault(self.number, (is_prefill, tokens, rows, blocks))

    def result(self, ms: int) -> None:
        is_prefill, tokens, rows, blocks = self.stored[self.number]
        self.number -= 1
        if is_prefill:
            self.add_prefill(tokens, ms)
        else:
            self.decodes.append((rows, blocks, ms))
            self.decode_count += 1
            if self.decode_count % 400 == 0:
                self.fit_decode()

    def add_prefill(self, x: int, y: int) -> None:
        n, sx, sy, sxx, sxy = self.points + 1, self.x + x, self.y + y, self.xx + x * x, self.xy + x * y
        divisor = n * sxx - sx * sx
        if n > 1 and divisor == 0:  # one x value only: the point is counted, nothing else
            self.points = n
            return
        if n > 1:
            slope = (n * sxy - sx * sy) / divisor
            intercept = (sy * sxx - sx * sxy) / divisor
            if slope <= 0 or intercept <= 0:
                if n == 2:
                    self.points = self.x = self.y = self.xx = self.xy = 0.0
                return
            self.slope, self.intercept = slope, intercept
        self.points, self.x, self.y, self.xx, self.xy = n, sx, sy, sxx, sxy

    def fit_decode(self) -> None:
        rows = [[0.0] * 4 for _ in range(3)]
        for n, k, ms in self.decodes:
            for i, a in enumerate((n, k, 1)):
                for j, b in enumerate((n, k, 1, ms)):
                    rows[i][j] += a * b
        solution = solve(rows)
        if solution is not None and all(value > 0 for value in solution):
            self.decode = (solution[0], solution[1], solution[2])


def solve(rows: list[list[float]]) -> Optional[list[float]]:
    """Solve three linear equations (Cramer's rule)."""

    def det(m: list[list[float]]) -> float:
        return (
            m[0][0] * (m[1][1] * m[2][2] - m[1][2] * m[2][1])
            - m[0][1] * (m[1][0] * m[2][2] - m[1][2] * m[2][0])
            + m[0][2] * (m[1][0] * m[2][1] - m[1][1] * m[2][0])
        )

    whole = det([row[:3] for row in rows])
    if abs(whole) < 1e-9:
        return None
    return [det([[*row[:i], row[3], *row[i + 1 : 3]] for row in rows]) / whole for i in range(3)]


class DynamicBatch:
    """Dynamic batch size."""

    def __init__(self, engine: MindIE) -> None:
        self.engine, self.most = engine, engine.seats
        self.low, self.up = 3, engine.seats
        self.odd = False
        self.rows: deque[int] = deque(maxlen=20000)
        self.gaps: deque[int] = deque(maxlen=20000)

    def average(self) -> int:
        total = weight = 0
        for n in reversed(self.rows):
            if weight + n > 20000:
                part = weight + n - 20000
                return (total + n * part) // (weight + part)
            weight += n
            total += n * n
        return total // weight if weight else 0

    def update(self) -> None:
        engine = self.engine
        now = len(engine.running) + len(engine.swapped)
        if not engine.waiting and not now:
            return
        average = self.average()
        late = sum(self.gaps) / len(self.gaps) if len(self.gaps) >= 2000 else 0
        target = engine.knobs["decodeExpectedTime"]
        if not average or not late or not self.rows:
            engine.seats = 3
            self.low = self.up = average
        self.odd = not self.odd
        if self.odd:
            if now > 0 and late > target + 5:
                engine.seats, engine.prefill_seats = now, 0
            return
        if late > target + 5:
            self.up, self.low = max(average, self.low + 3), max((self.low - 2) % UNSIGNED, 3)
        elif late < target - 5:
            self.low, self.up = min(average, (self.up - 3) % UNSIGNED), min(self.up + 2, self.most)
        else:
            self.up, self.low = min(average + 3, self.most), max((average - 2) % UNSIGNED, 3)
        self.low, self.up = (min(max(value, 3), self.most) for value in (self.low, self.up))
        new = (self.up + self.low) // 2
        new = min(max(new, engine.seats - 2), engine.seats + 2)
        new = min(max(new, now), self.most)
        engine.seats, engine.prefill_seats = new, max(new - now, 0)


class MindIE:
    """The scheduler and the loop around it."""

    def __init__(
        self, knobs: dict[str, Any], requests: list[Any], cost: dict[str, int], max_empty: int = 10000
    ) -> None:
        self.knobs = {**SHIPPED, **knobs}
        self.cost, self.max_empty = cost, max_empty
        ordered = sorted(requests, key=lambda row: row[1])
        self.coming = deque(Sequence(row[0], number, row[1], row[2], row[3]) for number, row in enumerate(ordered))
        self.all = {sequence.id: sequence for sequence in self.coming}
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.swapped: deque[Sequence] = deque()
        self.size = self.knobs["cacheBlockSize"]
        self.total = self.free = self.knobs["npuBlockNum"]
        self.host_free = self.knobs["cpuBlockNum"]
        self.seats = self.knobs["maxBatchSize"]
        self.prefill_seats = self.knobs["maxPrefillBatchSize"] or self.seats
        self.mixed = self.knobs["enableChunkedPrefill"]
        self.stage_policy = 1 if self.knobs["supportSelectBatch"] else self.knobs["stageSelectPolicy"]
        self.last_empty = self.new_first = False
        self.waste = 0
        self.fit = Fit()
        self.dynamic = DynamicBatch(self) if self.knobs["dynamicBatchSizeEnable"] and not self.mixed else None
        self.now = 0
        self.steps: list[dict[str, Any]] = []
        self.error: Optional[str] = None

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    # The loop.

    def run(self, max_rounds: int = 1 << 30) -> None:
        flight: Optional[Batch] = None
        empty = 0
        while len(self.steps) < max_rounds:
            if not (self.waiting or self.running or self.swapped):
                if not self.coming:
                    return
                self.now = max(self.now, self.coming[0].arrival)
            while self.coming and self.coming[0].arrival <= self.now:
                self.waiting.append(self.coming.popleft())
            try:
                batch, step = self.round()
            except EngineDied as died:
                self.error = f"exception: {died}"
                return
            self.steps.append(step)
            if step["empty"]:
                empty += 1
                if empty > self.max_empty:
                    self.error = "stuck: no progress"
                    return
                self.now += IDLE_POLL
                continue
            empty = 0
            batch.start = max(self.now, flight.end) if flight else self.now
            batch.end = batch.start + self.duration(batch, step)
            if not self.knobs["activateAsyncInference"]:
                self.now = batch.end
                self.result(batch, batch.time)
                continue
            step["start"] = batch.start
            if flight is not None:  # a call returns the result of the call before it
                self.now = flight.end = batch.start
                self.result(flight, batch.time)
            flight = batch

    def duration(self, batch: Batch, step: dict[str, Any]) -> int:
        cost = self.cost
        prompts = sum(tokens for _, tokens, is_prefill, _ in batch.rows if is_prefill)
        decodes = sum(not is_prefill for _, _, is_prefill, _ in batch.rows)
        return (
            cost["c0"] + cost["per_prefill_token"] * prompts + cost["per_decode_seq"] * decodes
            + cost["per_swap_block"] * step.get("swap_blocks", 0)
        )  # fmt: skip

    def result(self, batch: Batch, dispatched: int) -> None:
        """Take in the tokens of a batch that has ended; the newest one was dispatched at this time."""
        self.fit.result((batch.end - dispatched) // 1000)
        for sequence, _, _, gives in batch.rows:
            if sequence.finished or not gives:
                continue
            if self.dynamic is not None and sequence.first is not None:
                self.dynamic.gaps.append((batch.end - sequence.last) // 1000)
            sequence.last = batch.end
            sequence.come += 1
            if sequence.first is None:
                sequence.first = batch.end
            if sequence.tokens + sequence.resumed + sequence.come == sequence.output:
                sequence.finished, sequence.end = True, batch.end

    # One round.

    def round(self) -> tuple[Batch, dict[str, Any]]:
        kind = self.choose_kind()
        self.last_empty = False
        self.kind, self.preempted, self.swapped_in, self.moved, self.swaps = kind, [], [], 0, 0
        self.seats_left = self.prefill_seats if kind == "P" else self.seats
        longest, tokens = self.knobs["maxSeqLen"], self.knobs["maxPrefillTokens"]
        self.budget = tokens if kind == "M" else max(longest, tokens)
        self.used = 0
        self.decodes: list[tuple[Sequence, int]] = []
        self.prefills: dict[str, list[tuple[Sequence, int]]] = {"waiting": [], "swapped": [], "running": []}
        self.longs = 0
        if kind == "M":
            limit = self.knobs["longPrefillTokenThreshold"]
            self.longs = sum(not s.decodes and s.length - s.computed > limit for s in self.running)
        candidates = self.pop_candidates()
        self.victims: list[Sequence] = []
        self.swapped_out: list[Sequence] = []
        if kind != "P":
            self.running_pass(candidates["running"])
            if not self.preempted:
                self.swapped_pass(candidates["swapped"])
        if kind != "D":
            self.waiting_pass(candidates["waiting"])
        self.backfill(candidates)
        return self.dispatch()

    def choose_kind(self) -> str:
        if self.mixed:
            return "M"
        if self.last_empty and self.running:
            return "D"
        return (self.prefill_first, self.throughput, self.latency)[self.stage_policy]()

    def prefill_first(self) -> str:
        delay = self.knobs["maxQueueDelayMicroseconds"]
        ripe = bool(self.waiting) and (
            (delay > 5000 and len(self.waiting) >= self.prefill_seats) or self.now - self.waiting[0].arrival >= delay
        )
        if self.swapped or not ripe or self.free < int(single(single(0.05) * self.total)):
            return "D"
        return "P"

    def throughput(self) -> str:
        if not self.waiting:
            self.waste = 0
            return "D"
        count = len(self.running)
        if count <= self.seats:
            self.waste += self.knobs["decodeTimeMsPerReq"] * (self.seats - count)
        if self.knobs["prefillTimeMsPerReq"] * count > self.waste:
            return "D"
        self.waste = 0
        return "P"

    def latency(self) -> str:
        if not self.running:
            return "P"
        if not self.waiting or not self.prefill_seats:
            return "D"
        tokens = sum(s.length - s.computed for s in list(self.waiting)[: self.seats])
        cost = single(single(single(self.fit.slope) * tokens) + single(self.fit.intercept))
        running, swapped = list(self.running)[: self.seats], list(self.swapped)[: self.seats]
        rows = len(running) + len(swapped)
        blocks = sum(s.blocks for s in running) + sum(self.blocks_for(s.length) for s in swapped)
        a, b, c = self.fit.decode
        decode_cost = single(a * rows + b * blocks + c)
        wait = (self.now - self.waiting[0].arrival) // 1000
        goal, decode_goal = self.knobs["prefillExpectedTime"], self.knobs["decodeExpectedTime"]
        lax = single(single(goal - wait - cost) / goal) if goal else 0.0
        decode_lax = single(single(decode_goal - decode_cost) / decode_goal) if decode_goal else 0.0
        return "P" if lax < decode_lax else "D"

    def pop_candidates(self) -> dict[str, deque[Sequence]]:
        window = 2 * self.seats_left
        found: dict[str, deque[Sequence]] = {"running": deque(), "waiting": deque(), "swapped": deque()}
        resumed: deque[Sequence] = deque()
        order = {"P": ["waiting"], "D": ["running", "swapped"], "M": ["running", "waiting", "swapped"]}[self.kind]
        for name in order:
            queue: deque[Sequence] = getattr(self, name)
            while queue and sum(map(len, found.values())) < window:
                sequence = queue.popleft()
                come = sequence.come
                sequence.tokens, sequence.come = sequence.tokens + come, 0
                sequence.places = max(0, sequence.places - come)
                if sequence.finished:
                    self.free += sequence.blocks
                    self.host_free += sequence.host_blocks
                    sequence.blocks = sequence.host_blocks = 0
                elif self.kind == "P" and sequence.tokens:
                    resumed.append(sequence)
                else:
                    found[name].append(sequence)
        found["waiting"] += resumed
        return found

    def chunk(self, sequence: Sequence) -> int:
        rest = 1 if sequence.decodes else sequence.length - sequence.computed
        if self.kind != "M":
            return rest
        return min(rest, self.budget - self.used, self.knobs["prefillChunkSize"] or self.knobs["maxPrefillTokens"])

    def schedule(self, sequence: Sequence, tokens: int, source: str, seat: bool = True) -> None:
        self.used += tokens  # none is left for a decode behind the prompts: it runs all the same
        self.seats_left -= seat
        tokens = 1 if sequence.decodes else tokens
        rows = self.decodes if sequence.decodes else self.prefills[source]
        rows.append((sequence, tokens))

    def running_pass(self, candidates: deque[Sequence]) -> None:
        while candidates:
            sequence = candidates[0]
            tokens = self.chunk(sequence)
            if self.used + tokens > self.budget or self.seats_left <= 0:
                return
            candidates.popleft()
            while self.growth(sequence, tokens) > self.free or self.new_first:
                victim = candidates.pop() if candidates else sequence
                self.preempt(victim)
                self.new_first = False
                if victim is sequence:
                    return
            self.grow(sequence, tokens)
            self.schedule(sequence, tokens, "running")

    def growth(self, sequence: Sequence, tokens: int) -> int:
        tokens = 1 if sequence.decodes else tokens  # also if no token of the budget is left
        return max(0, self.blocks_for(sequence.computed + tokens) - sequence.blocks)

    def grow(self, sequence: Sequence, tokens: int) -> None:
        more = self.growth(sequence, tokens)
        self.free -= more
        sequence.blocks += more

    def preempt(self, victim: Sequence) -> None:
        if self.swaps < self.knobs["maxPreemptCount"] and self.blocks_for(victim.length) <= self.host_free:
            self.swaps += 1
            self.moved += victim.blocks
            self.host_free -= victim.blocks
            self.free += victim.blocks
            victim.host_blocks, victim.blocks = victim.blocks, 0
            self.swapped_out.append(victim)
            self.preempted.append((victim.id, "swap"))
            return
        self.free += victim.blocks
        victim.blocks = victim.computed = victim.places = 0
        victim.decodes = False
        if self.mixed:
            victim.prompt, victim.resumed, victim.tokens = (
                victim.prompt + victim.tokens, victim.resumed + victim.tokens, 0
            )  # fmt: skip
        self.victims.append(victim)
        self.preempted.append((victim.id, "recompute"))

    def swapped_pass(self, candidates: deque[Sequence]) -> None:
        while candidates:
            sequence = candidates[0]
            need = self.blocks_for(sequence.length)
            if need > self.total:
                raise EngineDied("Sequence too long.")
            tokens = self.chunk(sequence)
            if need > self.free or not tokens or self.used + tokens > self.budget or self.seats_left <= 0:
                return
            candidates.popleft()
            self.moved += sequence.host_blocks
            self.free -= sequence.host_blocks
            self.host_free += sequence.host_blocks
            sequence.blocks, sequence.host_blocks = sequence.host_blocks, 0
            self.grow(sequence, tokens)
            self.swapped_in.append(sequence.id)
            self.schedule(sequence, tokens, "swapped", seat=False)

    def waiting_pass(self, candidates: deque[Sequence]) -> None:
        skipped: list[Sequence] = []
        while candidates:
            sequence = candidates[0]
            need, is_new = self.blocks_for(sequence.length), not sequence.tokens
            if not is_new and need == self.free:
                break
            rest = sequence.length - sequence.computed
            is_long = self.kind == "M" and rest > self.knobs["longPrefillTokenThreshold"]
            if is_long and self.longs >= self.knobs["maxLongPartialPrefills"]:
                skipped.append(candidates.popleft())
                continue
            tokens = self.chunk(sequence)
            if need > self.total:
                raise EngineDied("Prompt sequence too long.")
            if need > self.free:
                waited = (self.now - sequence.arrival) // 1000
                if is_new and waited > self.knobs["maxFirstTokenWaitTime"]:
                    self.new_first = True
                break
            if not tokens or self.used + tokens > self.budget or self.seats_left <= 0:
                break
            candidates.popleft()
            self.free -= need
            sequence.blocks = need
            self.longs += is_long
            self.schedule(sequence, tokens, "waiting")
        candidates.extendleft(reversed(skipped))

    def backfill(self, candidates: dict[str, deque[Sequence]]) -> None:
        self.waiting.extend(self.victims)
        self.decodes.sort(key=lambda row: row[0].number)
        self.new = [row for name in ("waiting", "swapped", "running") for row in self.prefills[name]]
        self.running.extend(sequence for sequence, _ in self.decodes + self.new)
        self.swapped.extend(self.swapped_out)
        for name in ("waiting", "running", "swapped"):
            left = sorted(candidates[name], key=lambda sequence: sequence.number, reverse=True)
            getattr(self, name).extendleft(left)

    def dispatch(self) -> tuple[Batch, dict[str, Any]]:
        batch = Batch(self.now)
        step: dict[str, Any] = {
            "t": self.now, "mode": self.kind,
            "sched": [[s.id, n, "D"] for s, n in self.decodes] + [[s.id, n, "P"] for s, n in self.new],
            "free_gpu": self.free, "free_cpu": self.host_free,
            "queues": [len(self.waiting), len(self.running), len(self.swapped)],
        }  # fmt: skip
        blocks = sum(s.blocks for s, _ in self.decodes)
        is_prefill = self.kind == "P" and bool(self.new)
        self.fit.round(is_prefill, sum(n for _, n in self.new), len(self.decodes), blocks)
        for sequence, tokens in self.decodes + self.new:
            is_new = not sequence.decodes
            sequence.computed += tokens
            gives = sequence.computed == sequence.length
            if gives:
                sequence.decodes = True
                sequence.places += 1
            batch.rows.append((sequence, tokens, is_new, gives))
        for id, _ in self.preempted:
            self.all[id].preemptions += 1
        if self.preempted:
            step["preempted"] = [list(row) for row in sorted(self.preempted, key=lambda row: row[1] != "swap")]
        if self.swapped_in:
            step["swap_in"] = [row[0] for row in step["sched"] if row[0] in self.swapped_in]
        if self.moved:
            step["swap_blocks"] = self.moved
        step["empty"] = self.last_empty = not (step["sched"] or self.moved)
        if self.dynamic is not None:
            if self.kind == "D" and not step["empty"]:
                self.dynamic.rows.append(len(self.decodes))
            if not step["empty"] or not self.prefill_seats:
                self.dynamic.update()
            step["limits"] = [self.seats, self.prefill_seats]
        return batch, step

    def per_request(self) -> list[list[Any]]:
        return [[s.id, s.first, s.end, s.preemptions] for s in self.all.values()]

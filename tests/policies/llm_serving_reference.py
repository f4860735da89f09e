"""Reference implementation of llm-serving, simple and slow. Its output has the format of a recording.

A step takes all new arrivals, schedules, and makes at most one model call. A rejection takes no time, and an idle
server jumps to the next arrival.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Optional

WAITING, RUNNING, OUT_OF_RANGE, FINISHED, PADDING = "waiting", "running", "out of range", "finished", "padding"
MAX_IDLE_STEPS = 3  # idle steps with waiting requests, after which the server is stuck


@dataclass(eq=False)
class Entry:
    """A request, or a padding row."""

    id: str
    prompt: int = 1
    limit: int = 0
    stop_at: Optional[int] = None  # number of the end-of-sequence token
    fail_at: Optional[int] = None  # number of the token whose model call fails
    status: str = WAITING
    is_prompt: bool = True
    generated: int = 0
    blocks: int = 0
    cached: int = 0

    @property
    def length(self) -> int:
        return self.prompt + self.generated

    @property
    def live(self) -> bool:
        return self.status in (RUNNING, OUT_OF_RANGE)


@dataclass
class Reference:
    """The server; `run` returns a recording."""

    config: dict[str, Any]
    cost: dict[str, float]
    requests: list[dict[str, Any]]
    now: float = 0.0
    waiting: deque[Entry] = field(default_factory=deque)
    slots: list[Entry] = field(default_factory=list)
    finished_at: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch = self.config["decode_batch"][0]
        self.paged = self.config["page_attention"]
        self.max_seq_length = self.config["seq_length"][-1]
        self.block_size = self.config["block_size"]
        self.free = self.config["num_blocks"] - 1  # block 0 is the null block
        self.arrivals = deque(sorted(self.requests, key=lambda request: request["arrival"]))

    def run(self) -> dict[str, Any]:
        """Serve all requests, or until the server is stuck."""
        steps, idle_steps = [], 0
        while idle_steps < MAX_IDLE_STEPS:
            step = self.step()
            steps.append(step)
            if step["kind"] != "idle":
                idle_steps = 0
            elif self.arrivals:
                self.now = max(self.now, float(self.arrivals[0]["arrival"]))
            elif not self.waiting:
                break
            else:
                idle_steps += 1
        error = "livelock" if self.waiting else None
        inputs = {"config": self.config, "cost": self.cost, "requests": self.requests}
        return {**inputs, "steps": steps, "finished_at": self.finished_at, "error": error}

    def step(self) -> dict[str, Any]:
        """Take new arrivals, schedule, and make the model call."""
        step: dict[str, Any] = {"t": self.now, "admitted": [], "swapped_out": [], "inserted": []}
        while self.arrivals and self.arrivals[0]["arrival"] <= self.now:
            spec = self.arrivals.popleft()
            limits = spec["max_new_tokens"], spec.get("eos_at"), spec.get("fail_at")
            self.waiting.append(Entry(spec["id"], spec["prompt_len"], *limits))
            step["admitted"].append(spec["id"])
        continuous = self.config["strategy"] == "continuous"
        (self.schedule_paged if self.paged and continuous else self.schedule_rows)(step)
        step["kind"] = self.call(step)
        finished = [slot for slot in self.slots if slot.status == FINISHED]
        for entry in finished:
            self.free += entry.blocks
            entry.blocks = 0
        return {**step, "t_end": self.now, "waiting": [e.id for e in self.waiting], "free_blocks": self.free}

    def insert(self, slot_index: int, step: dict[str, Any]) -> None:
        """Put the head of the waiting queue into a slot."""
        entry = self.waiting.popleft()
        entry.status = OUT_OF_RANGE if entry.prompt + entry.limit >= self.max_seq_length else RUNNING
        self.slots[slot_index:slot_index + 1] = [entry]  # fmt: skip
        step["inserted"].append({"id": entry.id, "slot": slot_index})

    def blocks_needed(self, entry: Entry) -> int:
        """Return the new blocks for the next model call."""
        tokens = entry.length if entry.is_prompt else 1
        return max(0, -(-(entry.cached + tokens) // self.block_size) - entry.blocks)

    def schedule_paged(self, step: dict[str, Any]) -> None:
        """Preempt the shortest requests until the rest fits. Without a preemption, fill free slots from the queue."""
        self.slots += [Entry("", status=PADDING, is_prompt=False) for _ in range(self.batch - len(self.slots))]
        while sum(self.blocks_needed(slot) for slot in self.slots if slot.live) > self.free:
            victim = min((slot for slot in self.slots if slot.live), key=lambda slot: slot.length)
            slot_index = self.slots.index(victim)
            self.free += victim.blocks
            victim.blocks = victim.cached = 0
            victim.status, victim.is_prompt = WAITING, True
            self.waiting.appendleft(victim)
            self.slots[slot_index] = Entry("", status=PADDING, is_prompt=False)
            step["swapped_out"].append({"id": victim.id, "slot": slot_index})
        if step["swapped_out"]:
            return
        budget = self.free - sum(self.blocks_needed(slot) for slot in self.slots if slot.live)
        while self.waiting:
            free_slots = [slot_index for slot_index, slot in enumerate(self.slots) if not slot.live]
            budget -= self.blocks_needed(self.waiting[0])
            if not free_slots or budget < 0:
                return
            self.insert(free_slots[0], step)

    def schedule_rows(self, step: dict[str, Any]) -> None:
        """Start a new batch, padded with copies of the last row; or refill the free rows of the current one."""
        static = self.config["strategy"] == "static"
        if not any(e.live for e in self.slots) if static else all(e.status == FINISHED for e in self.slots):
            self.slots = []
            while self.waiting and len(self.slots) < self.batch:
                self.insert(len(self.slots), step)
            if self.slots:
                last = self.slots[-1]
                status = last.status if last.status == OUT_OF_RANGE else PADDING
                self.slots += [Entry(last.id, last.prompt, status=status) for _ in range(self.batch - len(self.slots))]
        elif not static:
            for slot_index, slot in enumerate(self.slots):
                if self.waiting and not slot.live:
                    self.insert(slot_index, step)

    def call(self, step: dict[str, Any]) -> str:
        """Reject requests that are out of range; else prefill; else decode."""
        if not any(slot.live for slot in self.slots):
            return "idle"
        prompts = [slot for slot in self.slots if slot.is_prompt]
        out_of_range = [slot for slot in prompts if slot.status == OUT_OF_RANGE]
        if out_of_range:
            self.finished_at[out_of_range[0].id] = self.now  # the other clients get no response
            for slot in out_of_range:
                slot.status, slot.is_prompt = FINISHED, False
            return "reject"
        if prompts:
            rows = prompts[: 1 if self.paged else self.config["prefill_batch"][0]]
            step["prefill"] = [{"id": row.id} for row in rows]
            self.run_rows(rows, "prefill")
            return "prefill"
        rows = [slot for slot in self.slots if slot.status == RUNNING]
        step["valid"] = [self.slots.index(row) for row in rows]
        self.run_rows(rows, "decode")
        return "decode"

    def run_rows(self, rows: list[Entry], kind: str) -> None:
        """Make a model call: one token per row, then finish rows at their limit."""
        self.now += self.cost[kind]
        live_rows = [row for row in rows if row.status == RUNNING]
        for row in live_rows if self.paged else ():
            blocks = self.blocks_needed(row)
            if blocks > self.free:
                raise MemoryError("block pool is out of memory")
            self.free -= blocks
            row.blocks += blocks
            row.cached += row.length if row.is_prompt else 1
        for row in rows:
            row.is_prompt = False
        failed = any(row.fail_at == row.generated + 1 for row in live_rows)
        max_length = self.config["max_generate_length"] if self.paged else None
        for row in live_rows:
            row.generated += 1
            if failed or row.generated == row.stop_at or row.generated >= row.limit:
                row.status = FINISHED
                self.finished_at[row.id] = self.now
            elif max_length is not None and row.length >= max_length:
                row.status = FINISHED  # and its client gets no response

"""llm-serving told a second time, plainly and slowly: one step of its loop after the other, in the form of a recording.

An iteration sees all who have arrived, schedules, and runs one step; rejects cost nothing, and an idle server jumps to
the next arrival.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Optional

WAITING, RUNNING, STRANGE, OVER, PADDING = "waiting", "running", "out of range", "over", "padding"
IDLE = 3  # turns of an idle server with people waiting, after which it will idle forever


@dataclass(eq=False)
class Entry:
    """A request, or a padding row."""

    id: str
    prompt: int = 1
    limit: int = 0
    stop: Optional[int] = None  # the token that ends it, of itself
    fail: Optional[int] = None  # the token at which its call fails
    status: str = WAITING
    is_prompt: bool = True
    out: int = 0
    blocks: int = 0
    cached: int = 0

    @property
    def length(self) -> int:
        return self.prompt + self.out

    @property
    def live(self) -> bool:
        return self.status in (RUNNING, STRANGE)


@dataclass
class Reference:
    """The server; `run` gives a recording."""

    config: dict[str, Any]
    cost: dict[str, float]
    requests: list[dict[str, Any]]
    now: float = 0.0
    waiting: deque[Entry] = field(default_factory=deque)
    slots: list[Entry] = field(default_factory=list)
    told: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.batch = self.config["decode_batch"][0]
        self.paged = self.config["page_attention"]
        self.longest = self.config["seq_length"][-1]
        self.size = self.config["block_size"]
        self.free = self.config["num_blocks"] - 1  # block 0 is the null block
        self.coming = deque(sorted(self.requests, key=lambda request: request["arrival"]))

    def run(self) -> dict[str, Any]:
        """Serve everything, or until nothing will ever happen again."""
        steps, idle = [], 0
        while idle < IDLE:
            step = self.step()
            steps.append(step)
            if step["kind"] != "idle":
                idle = 0
            elif self.coming:
                self.now = max(self.now, float(self.coming[0]["arrival"]))
            elif not self.waiting:
                break
            else:
                idle += 1
        error = "livelock" if self.waiting else None
        asked = {"config": self.config, "cost": self.cost, "requests": self.requests}
        return {**asked, "steps": steps, "finished_at": self.told, "error": error}

    def step(self) -> dict[str, Any]:
        """Let in who has come, schedule, and run what is due."""
        step: dict[str, Any] = {"t": self.now, "admitted": [], "swapped_out": [], "inserted": []}
        while self.coming and self.coming[0]["arrival"] <= self.now:
            q = self.coming.popleft()
            self.waiting.append(Entry(q["id"], q["prompt_len"], q["max_new_tokens"], q.get("eos_at"), q.get("fail_at")))
            step["admitted"].append(q["id"])
        continuous = self.config["strategy"] == "continuous"
        (self.schedule_paged if self.paged and continuous else self.schedule_rows)(step)
        step["kind"] = self.call(step)
        over = [slot for slot in self.slots if slot.status == OVER]
        for entry in over:
            self.free += entry.blocks
            entry.blocks = 0
        return {**step, "t_end": self.now, "waiting": [e.id for e in self.waiting], "free_blocks": self.free}

    def insert(self, place: int, step: dict[str, Any]) -> None:
        """Give the head of waiting a place."""
        entry = self.waiting.popleft()
        entry.status = STRANGE if entry.prompt + entry.limit >= self.longest else RUNNING
        self.slots[place:place + 1] = [entry]  # fmt: skip
        step["inserted"].append({"id": entry.id, "slot": place})

    def needed(self, entry: Entry) -> int:
        """Return the blocks that its next call takes."""
        tokens = entry.length if entry.is_prompt else 1
        return max(0, -(-(entry.cached + tokens) // self.size) - entry.blocks)

    def schedule_paged(self, step: dict[str, Any]) -> None:
        """Throw out the shortest while not all fit; if nobody was, fill free slots from the head."""
        self.slots += [Entry("", status=PADDING, is_prompt=False) for _ in range(self.batch - len(self.slots))]
        while sum(self.needed(slot) for slot in self.slots if slot.live) > self.free:
            victim = min((slot for slot in self.slots if slot.live), key=lambda slot: slot.length)
            place = self.slots.index(victim)
            self.free += victim.blocks
            victim.blocks = victim.cached = 0
            victim.status, victim.is_prompt = WAITING, True
            self.waiting.appendleft(victim)
            self.slots[place] = Entry("", status=PADDING, is_prompt=False)
            step["swapped_out"].append({"id": victim.id, "slot": place})
        if step["swapped_out"]:
            return
        budget = self.free - sum(self.needed(slot) for slot in self.slots if slot.live)
        while self.waiting:
            places = [place for place, slot in enumerate(self.slots) if not slot.live]
            budget -= self.needed(self.waiting[0])
            if not places or budget < 0:
                return
            self.insert(places[0], step)

    def schedule_rows(self, step: dict[str, Any]) -> None:
        """Make a new list of rows, filled up with copies of the last; or refill the rows that nobody needs."""
        static = self.config["strategy"] == "static"
        if not any(e.live for e in self.slots) if static else all(e.status == OVER for e in self.slots):
            self.slots = []
            while self.waiting and len(self.slots) < self.batch:
                self.insert(len(self.slots), step)
            if self.slots:
                last = self.slots[-1]
                status = last.status if last.status == STRANGE else PADDING
                self.slots += [Entry(last.id, last.prompt, status=status) for _ in range(self.batch - len(self.slots))]
        elif not static:
            for place, slot in enumerate(self.slots):
                if self.waiting and not slot.live:
                    self.insert(place, step)

    def call(self, step: dict[str, Any]) -> str:
        """Answer who is out of range; else run prompts; else decode."""
        if not any(slot.live for slot in self.slots):
            return "idle"
        prompts = [slot for slot in self.slots if slot.is_prompt]
        strange = [slot for slot in prompts if slot.status == STRANGE]
        if strange:
            self.told[strange[0].id] = self.now  # the others are never told
            for slot in strange:
                slot.status, slot.is_prompt = OVER, False
            return "reject"
        if prompts:
            rows = prompts[: 1 if self.paged else self.config["prefill_batch"][0]]
            step["prefill"] = [{"id": row.id} for row in rows]
            self.write(rows, "prefill")
            return "prefill"
        rows = [slot for slot in self.slots if slot.status == RUNNING]
        step["valid"] = [self.slots.index(row) for row in rows]
        self.write(rows, "decode")
        return "decode"

    def write(self, rows: list[Entry], kind: str) -> None:
        """Run a call: a token for everybody in it, and who is over with that."""
        self.now += self.cost[kind]
        rows_alive = [row for row in rows if row.status == RUNNING]
        for row in rows_alive if self.paged else ():
            need = self.needed(row)
            if need > self.free:
                raise MemoryError("block pool is out of memory")
            self.free -= need
            row.blocks += need
            row.cached += row.length if row.is_prompt else 1
        for row in rows:
            row.is_prompt = False
        failed = any(row.fail == row.out + 1 for row in rows_alive)
        cut = self.config["max_generate_length"] if self.paged else None
        for row in rows_alive:
            row.out += 1
            if failed or row.out == row.stop or row.out >= row.limit:
                row.status = OVER
                self.told[row.id] = self.now
            elif cut is not None and row.length >= cut:
                row.status = OVER  # and its client is not told

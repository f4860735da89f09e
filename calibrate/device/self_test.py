"""A workout for a backend: requests that come, grow, are cut in chunks, swapped out and back, and leave, in any order.

Every score it gives is compared with that of one plain pass over the same tokens without a cache, so it shows whether
the cache, the tables and the swaps are right on this device. Lengths are tokens.
Runs next to the device: standard library and numpy, Python 3.9.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Callable, Optional

from .backend import Row

FIRST_TOKENS = (1, 7, 16, 17, 40, 64, 70, 130)  # prompts: around a block, around a tile, and several of both
ANSWER = 8  # tokens each of them writes


class Guest:
    """One request of the workout."""

    def __init__(self, tokens: list[int], answer: int) -> None:
        self.tokens = tokens
        self.left = answer
        self.cached = 0
        self.table: list[int] = []  # blocks on the device, or on the host while it is out
        self.scores: dict[int, Any] = {}  # by the place of the token they came after


class Workout:
    """A block pool, the guests in it, and what happened."""

    def __init__(self, backend: Any, about: dict[str, Any], seed: int, spoil: bool = False) -> None:
        self.backend = backend
        self.chance = random.Random(seed)
        self.size = about["block_size"]
        self.free = list(range(about["blocks"]))
        self.host = list(range(about["host_blocks"]))
        self.chance.shuffle(self.free)
        self.chance.shuffle(self.host)
        self.spoil = spoil
        self.inside: list[Guest] = []
        self.outside: list[Guest] = []
        self.counts = {"steps": 0, "chunks": 0, "swaps": 0, "spoiled": 0, "largest": 0, "smallest": 1 << 30}

    def run(self, guests: Sequence[Guest]) -> None:
        """Serve all of them, a few more or fewer at each step."""
        queue = list(guests)
        while queue or self.inside or self.outside:
            if self.outside and (not self.inside or self.chance.random() < 0.5):
                self._bring_back(self.outside.pop(0))
            elif len(self.inside) > 1 and self.chance.random() < 0.3:
                self._send_out(self.chance.choice(self.inside))
            for _ in range(self.chance.choice((0, 1, 1, 2))):
                if queue:
                    self.inside.append(queue.pop(0))
            if self.inside:
                self._step()

    def _step(self) -> None:
        rows = [self._row(guest) for guest in self.inside]
        self.counts["steps"] += 1
        self.counts["largest"] = max(self.counts["largest"], len(rows))
        self.counts["smallest"] = min(self.counts["smallest"], len(rows))
        for guest, row, scores in zip(list(self.inside), rows, self._scores(rows)):
            guest.cached = row.position + len(row.tokens)
            if guest.cached == len(guest.tokens):
                self._write(guest, scores)

    def _scores(self, rows: Sequence[Row]) -> Any:
        self.backend.step(rows)
        return self.backend.logits()

    def _row(self, guest: Guest) -> Row:
        """Take some of what it has pending, and the blocks for it."""
        pending = len(guest.tokens) - guest.cached
        tokens = self.chance.randint(1, pending) if self.chance.random() < 0.5 else pending
        self.counts["chunks"] += tokens > 1 and guest.cached > 0
        end = guest.cached + tokens
        while len(guest.table) * self.size < end:
            guest.table.append(self.free.pop())
        table = list(guest.table)
        if self.spoil and tokens == 1 and guest.cached > self.size and not self.counts["spoiled"]:
            table[0], table[1] = table[1], table[0]
            self.counts["spoiled"] += 1
        return Row(guest.tokens[guest.cached : end], guest.cached, table)

    def _write(self, guest: Guest, scores: Any) -> None:
        guest.scores[len(guest.tokens) - 1] = scores
        guest.left -= 1
        if guest.left:
            guest.tokens.append(int(scores.argmax()))
        else:
            self.inside.remove(guest)
            self.free.extend(guest.table)
            self.chance.shuffle(self.free)

    def _send_out(self, guest: Guest) -> None:
        if not guest.table or len(guest.table) > len(self.host):
            return
        places = [self.host.pop() for _ in guest.table]
        self.backend.swap_out(list(zip(guest.table, places)))
        self.free = guest.table + self.free
        self.chance.shuffle(self.free)
        guest.table = places
        self.inside.remove(guest)
        self.outside.append(guest)
        self.counts["swaps"] += 1

    def _bring_back(self, guest: Guest) -> None:
        blocks = [self.free.pop() for _ in guest.table]
        self.backend.swap_in(list(zip(guest.table, blocks)))
        self.host.extend(guest.table)
        guest.table = blocks
        self.inside.append(guest)


def run(backend: Any, args: dict[str, Any], emit: Optional[Callable[[Any], None]] = None) -> dict[str, Any]:
    """Exercise a loaded backend and return counts, tokens that differ from the plain pass, and the largest error.

    The error is that of a score relative to the largest score. With `spoil`, one block table is wrong once: the error
    must show it.
    """
    about = backend.describe()
    chance = random.Random(args.get("seed", 0))
    lengths = args.get("prompts", FIRST_TOKENS)
    guests = [
        Guest([chance.randrange(about["model"]["vocab"]) for _ in range(length)], args.get("answer", ANSWER))
        for length in lengths
    ]
    workout = Workout(backend, about, args.get("seed", 0), args.get("spoil", False))
    workout.run(guests)
    compared: dict[str, Any] = {**workout.counts, "scores": 0, "differ": 0, "error": 0.0}
    for guest in guests:
        plain = backend.plain(guest.tokens)
        scale = float(abs(plain).max())
        for place, scores in guest.scores.items():
            compared["scores"] += 1
            compared["differ"] += int(scores.argmax() != plain[place].argmax())
            compared["error"] = max(compared["error"], float(abs(scores - plain[place]).max()) / scale)
    return compared

"""What the prompts of a synthetic workload share: prefixes, such as system prompts, and conversations.

    prefixes: {count: 20, tokens: 1500, zipf: 1.1, share: 0.7}
    sessions: {turns: [1, 8], think_time: 20}

Each has its own random stream: the arrivals and the lengths of new text stay the same without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Optional

import numpy as np
from pydantic import Field
from servesim.core.content import Content
from servesim.files.checked import AnyAtLeast0, Finite, Keys, Limits, Seconds, WholeUpTo, expects
from servesim.traces.contents import Name, first_turn, next_turn
from servesim.traces.trace import Columns, stream

from .arrivals import Pauses, draw_pauses
from .lengths import Distribution

MAX_PREFIXES = 10**6
Share = Annotated[Finite, Field(ge=0, le=1), expects("a number from 0 to 1")]


class Prefixes(Keys):
    """Texts at the beginning of prompts, as system prompts or examples. They are added to the prompt lengths."""

    count: Annotated[int, WholeUpTo(MAX_PREFIXES)] = Field(description="number of different prefixes")
    tokens: Distribution = Field(description="length of each prefix: a distribution, a number, or [low, high]")
    zipf: Annotated[AnyAtLeast0, Limits(0, 100)] = Field(
        0.0, description="exponent of Zipf's law, no unit: the use of the k-th prefix is proportional to k**-zipf"
    )
    share: Share = Field(1.0, description="fraction of the requests (or sessions) with a prefix, 0 to 1")

    def draw(self, count: int, seed: int) -> list[Optional[tuple[Name, int]]]:
        """Return the prefix of each of `count` requests and its tokens; None if it has none."""
        tokens = self.tokens.lengths(stream(seed, "prefix lengths").standard_normal(self.count))
        weights = np.arange(1, self.count + 1, dtype=np.float64) ** -self.zipf
        random = stream(seed, "prefixes")
        has_prefix = random.random(count) < self.share
        ranks = random.choice(self.count, size=count, p=weights / weights.sum())
        return [(f"prefix:{k}", tokens[k]) if has else None for k, has in zip(ranks.tolist(), has_prefix.tolist())]


class Sessions(Keys):
    """Conversations. The prompt of a turn is the one before, its answer, and new text of the drawn prompt length."""

    turns: Distribution = Field(description="turns of a session: a distribution, a number, or [low, high]")
    think_time: Seconds = Field(0.0, description="seconds from an answer to the next prompt; not in a closed loop")
    pauses: Pauses = "constant"

    def draw_turns(self, count: int, seed: int) -> list[int]:
        """Return the numbers of turns of `count` sessions."""
        return self.turns.lengths(stream(seed, "turns").standard_normal(count))

    def turns_of(self, requests: int, seed: int) -> list[int]:
        """Return the numbers of turns of sessions that have `requests` turns in all; the last session may be cut."""
        ends = np.cumsum(self.draw_turns(requests, seed))
        last = int(np.searchsorted(ends, requests))
        ends[last] = requests
        return list(np.diff(ends[: last + 1], prepend=0).tolist())

    def order_turns(self, columns: Columns, starts: Sequence[float], turns: Sequence[int], seed: int) -> None:
        """Set sessions, predecessors and arrivals of the requests of sessions that start at these times."""
        delays = draw_pauses(self.pauses, self.think_time, sum(turns), seed)
        rows, turn = [], 0  # earliest arrival, session, pause before the turn
        for session, (start, count) in enumerate(zip(starts, turns)):
            arrival = start
            for k in range(count):
                pause = float(delays[turn]) if k else 0.0
                arrival += pause
                rows.append((arrival, session, pause))
                turn += 1
        rows.sort(key=lambda row: row[0])  # turns of one session stay in order
        columns.follows = previous_of([session for _, session, _ in rows])
        columns.arrival = [row[0] if before is None else None for row, before in zip(rows, columns.follows)]
        columns.session = [f"session-{session}" for _, session, _ in rows]
        columns.think_time = [pause for _, _, pause in rows]


def previous_of(owners: Sequence[int]) -> list[Optional[int]]:
    """Return the index of the row before each one with the same owner; None for the first row of an owner."""
    last: dict[int, int] = {}
    before = []
    for k, owner in enumerate(owners):
        before.append(last.get(owner))
        last[owner] = k
    return before


def previous_turns(follows: Sequence[Optional[int]], turns: Sequence[int]) -> list[Optional[int]]:
    """Return the turn before each request of users in a closed loop, who start the next session when one is over."""
    numbers = iter(turns)
    left: list[int] = []  # after each request: turns until the end of its session
    before: list[Optional[int]] = []
    for user_before in follows:
        previous = user_before if user_before is not None and left[user_before] else None
        left.append((next(numbers) if previous is None else left[previous]) - 1)
        before.append(previous)
    return before


def add_texts(
    columns: Columns, prefixes: Sequence[Optional[tuple[Name, int]]], before: Sequence[Optional[int]]
) -> None:
    """Add prefixes and earlier turns to the prompts. `before`: the turn before each request, None for a first turn."""
    continued = set(before)
    contents: list[Optional[Content]] = []
    for k, (prefix, previous) in enumerate(zip(prefixes, before)):
        earlier = None if previous is None else contents[previous]
        if previous is not None and earlier is not None:
            columns.prompt[k] += columns.prompt[previous] + columns.output[previous]
            contents.append(next_turn(k, columns.prompt[k], earlier, columns.output[previous]))
        elif prefix is not None or k in continued:
            columns.prompt[k] += prefix[1] if prefix else 0
            contents.append(first_turn(k, columns.prompt[k], [prefix] if prefix else []))
        else:
            contents.append(None)
    columns.content = contents

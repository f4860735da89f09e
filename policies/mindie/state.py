"""The state that one round of MindIE-LLM leaves to the next."""

from __future__ import annotations

from typing import Any, Optional

from servesim.core import Values

from .feedback import Feedback


class MindIEState(Values):
    """Policy state: what the scheduler keeps from one round to the next."""

    __slots__ = ("feedback", "kind", "last_empty", "new_first", "resumed", "tail", "waste", "waste_step")

    def __init__(
        self, kind: str = "", last_empty: bool = False, new_first: bool = False, waste: int = 0, waste_step: int = 0,
        resumed: int = 0, tail: int = 0, feedback: Optional[Feedback] = None,
    ) -> None:  # fmt: skip
        self.kind = kind  # of the last round: P, D or M
        self.last_empty = last_empty  # the last round did nothing
        self.new_first = new_first  # the next running pass preempts one request, for a new one that waits too long
        self.waste = waste  # seats that decodes have left empty, weighted (throughput)
        self.waste_step = waste_step  # what one more held step adds to it
        self.resumed = resumed  # preempted requests in waiting, at most
        # the requests before the last `tail` of running are in the order of arrival; FOREVER: nothing is known
        self.tail = tail
        self.feedback = feedback  # None: the settings need no results

    def values(self) -> tuple[Any, ...]:
        return (
            self.kind, self.last_empty, self.new_first, self.waste, self.waste_step, self.resumed, self.tail,
            self.feedback,
        )  # fmt: skip

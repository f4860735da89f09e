"""The result of a token check: answers of a measured run against the same requests alone; text, JSON and tolerance.

An answer differs if one of its tokens differs. Answers that differ only at near ties are named, but they count too: a
contest that compares answers cannot know the logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Optional, Union

from servesim.core import BadInput

DEFAULT_SAMPLE = 16  # requests
SHOWN_ANSWERS = 5  # answers that differ, in the text


def sample_size(text: str, requests: int) -> int:
    """Return how many requests of a run --check-tokens names: a number, all, or the default for an empty text."""
    if text in ("", "all"):
        return requests if text == "all" else min(DEFAULT_SAMPLE, requests)
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0):
        raise BadInput(f"--check-tokens: expected a number of requests from 1, or all, got {text!r}")
    if int(text) > requests:
        raise BadInput(f"--check-tokens: expected at most {requests}, the requests of the run, or all, got {text}")
    return int(text)


def allowed_differences(text: str, answers: int) -> int:
    """Return how many of the checked answers may differ: --tolerance-tokens is a number, or e.g. 5% of them."""
    is_share = text.strip().endswith("%")
    try:
        value = float(text.strip()[:-1]) / 100 if is_share else float(int(text))
    except ValueError:
        value = -1.0
    if not 0 <= value <= (1 if is_share else 1e9):
        raise BadInput(f"--tolerance-tokens: expected a number of answers or a percentage, e.g. 2 or 5%, got {text!r}")
    return int(value * answers + 1e-9) if is_share else int(value)


@dataclass(frozen=True)
class Difference:
    """One token that differs. The fields are keys of result.json."""

    index: int  # of the output token, or of the character in a text, from 0
    live: Union[int, str, None]  # token or text there; None: the answer ended before
    alone: Union[int, str, None]
    gap: Optional[float] = None  # of the two tokens, in the logits of the single run
    bound: Optional[float] = None  # of the gap of a near tie
    near_tie: Optional[bool] = None  # None: the logits are not known


@dataclass(frozen=True)
class CheckedAnswer:
    """One answer of a run, compared with that of the request alone. The fields are keys of result.json."""

    id: Any
    prompt: int  # tokens
    tokens: int
    events: Sequence[str]  # preempted, swapped, chunked
    different: int  # tokens that differ; for texts 1 if they differ
    beyond_ties: int  # of these, not at a near tie
    first: Optional[Difference]
    first_beyond_ties: Optional[Difference]
    gap_to_bound: Optional[float] = None  # the largest gap of a token that differs, relative to the bound of a near tie
    logits: Mapping[str, Any] = field(default_factory=dict)

    @property
    def only_near_ties(self) -> bool:
        """Whether the answer differs, but only at near ties."""
        return self.different > 0 and self.beyond_ties == 0


@dataclass(frozen=True)
class TokenCheck:
    """All checked answers of a run."""

    answers: Sequence[CheckedAnswer]
    asked: int  # requests to check
    seconds: float  # of the single runs
    unit: str = "token"  # what was compared: token, or character of the text
    dtype: Optional[str] = None
    bound: Optional[float] = None  # of a near tie, in standard deviations of the logits
    stopped: bool = False  # by the user, before all answers were checked
    failed: Mapping[str, int] = field(default_factory=dict)  # sampled requests without two complete answers, by reason

    @property
    def different(self) -> list[CheckedAnswer]:
        """The answers that differ, first those that differ beyond near ties."""
        found = [answer for answer in self.answers if answer.different]
        return sorted(found, key=lambda answer: answer.only_near_ties)

    def within(self, tolerance: str) -> bool:
        """Whether enough answers are equal. A check without an answer shows nothing, so it is not passed."""
        return bool(self.answers) and len(self.different) <= allowed_differences(tolerance, len(self.answers))

    @property
    def logits(self) -> dict[str, Any]:
        """The logit differences over all answers."""
        parts = [answer.logits for answer in self.answers if answer.logits.get("compared")]
        totals = {key: sum(part[key] for part in parts) for key in ("compared", "not_finite", "near_ties")}
        largest = {
            key: max((p[key] for p in parts if p[key] is not None), default=None) for key in ("largest", "relative")
        }
        return {"answers": len(parts), **totals, **largest}

    def as_dict(self) -> dict[str, Any]:
        """Return the check as JSON: totals, then one entry per answer."""
        different = self.different
        return {
            "checked": len(self.answers), "equal": len(self.answers) - len(different), "different": len(different),
            "only_near_ties": sum(answer.only_near_ties for answer in different),
            **{key: value for key, value in asdict(self).items() if key != "answers"},
            "logits": self.logits, "answers": [asdict(answer) for answer in self.answers],
        }  # fmt: skip


def check_from_worker(result: Optional[Mapping[str, Any]]) -> Optional[TokenCheck]:
    """Return the check of the live driver."""
    if result is None:
        return None
    answers = []
    for row in result["answers"]:
        first, beyond = (row[key] and Difference(**row[key]) for key in ("first", "first_beyond_ties"))
        answers.append(CheckedAnswer(**{**row, "first": first, "first_beyond_ties": beyond}))
    missing = result["asked"] - max(result["finished"], len(answers))
    return TokenCheck(
        answers, result["asked"], result["seconds"], "token", result["dtype"], result["bound"], result["stopped"],
        {"without a complete answer": missing} if missing > 0 else {},
    )  # fmt: skip


def format_check(check: TokenCheck, tolerance: str) -> list[str]:
    """Return the lines of the report."""
    count, different = len(check.answers), check.different
    counts = Counter(event for answer in check.answers for event in answer.events)  # preempted, swapped or chunked
    events = "".join(f", {number} {event}" for event, number in counts.items())
    lines = [
        f"token check: {count - len(different)} of {count} answers equal those of the same requests alone "
        f"({sum(answer.tokens for answer in check.answers)} tokens{events})"
    ]
    if check.stopped:
        lines.append(f"the check was stopped after {count} of {check.asked} requests")
    lines += [f"not checked: {number} requests {reason}" for reason, number in check.failed.items()]
    if different:
        lines += describe_different(check)
    lines += describe_logits(check)
    allowed = allowed_differences(tolerance, count)
    result = "met" if check.within(tolerance) else f"missed by {len(different) - allowed}" if count else "missed"
    return [*lines, f"tolerance {tolerance.strip()} answers ({allowed} of {count}): {result}"]


def describe_different(check: TokenCheck) -> list[str]:
    """Return how many answers differ and the first difference of some of them."""
    different = check.different
    lines = [f"answers that differ: {len(different)}"]
    if check.bound is not None:
        lines[0] += f", only at near ties: {sum(answer.only_near_ties for answer in different)}"
    if gaps := [answer.gap_to_bound for answer in different if answer.gap_to_bound is not None]:
        lines[0] += f"; the largest logit gap of a token that differs is {max(gaps):.3g} times the bound of a near tie"
    for answer in different[:SHOWN_ANSWERS]:
        difference = answer.first_beyond_ties or answer.first
        assert difference is not None
        events = f" ({', '.join(answer.events)})" if answer.events else ""
        lines.append(f"request {answer.id}: {describe_difference(difference, check.unit)}{events}")
    if len(different) > SHOWN_ANSWERS:
        lines.append(f"further answers that differ: {len(different) - SHOWN_ANSWERS}")
    return lines


def describe_difference(difference: Difference, unit: str) -> str:
    """Return one difference: where, both tokens, and whether it is a near tie."""
    live, alone = ("the end" if value is None else repr(value) for value in (difference.live, difference.alone))
    text = f"first difference at {unit} {difference.index + 1}: {live} in the run, {alone} alone"
    if difference.gap is None or difference.bound is None:
        return text
    kind = "a near tie" if difference.near_tie else "not a near tie"
    return f"{text}, logit gap {difference.gap:.3g}, {kind} (bound {difference.bound:.3g})"


def describe_logits(check: TokenCheck) -> list[str]:
    """Return the largest logit difference, and what rounding explains."""
    logits = check.logits
    if not logits["compared"] or check.bound is None:
        return []
    lines = []
    if logits["largest"] is not None:
        lines.append(
            f"largest logit difference: {logits['largest']:.3g} ({logits['relative']:.3g} standard deviations of the "
            f"logits), {logits['compared']} tokens of {logits['answers']} answers"
        )
    if logits["not_finite"]:
        lines.append(f"logits that are not finite: at {logits['not_finite']} tokens")
    share = 100 * logits["near_ties"] / logits["compared"]
    bound = f"{check.bound:.3g} standard deviations of the logits in {check.dtype}"
    return [*lines, f"near tie: two logits closer than {bound}; {share:.1f} % of the compared tokens are one"]

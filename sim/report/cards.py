"""The card at the top of a page: the answer in one sentence, the main number, and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from servesim.study.experiment import format_value


class MetricFact(NamedTuple):
    """A further metric of the result."""

    name: str
    value: str
    change: str = ""  # from the baseline


@dataclass(frozen=True)
class ResultCard:
    """The content of the card."""

    title: str
    verdict: str
    won: bool = False
    big: str = ""  # the main number
    change: str = ""  # how it compares with the baseline
    facts: Sequence[MetricFact] = ()
    settings: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()


def setting_chips(assignment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return settings as (short name, value)."""
    return [(key.removeprefix("policy."), format_value(value)) for key, value in assignment.items()]


def sentence(text: str) -> str:
    """Return a note of a printed table as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."

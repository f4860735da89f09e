"""The trace formats that can be read: how each is recognised and which column of it holds what."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..core import BadInput
from .flat import flat, ours
from .source import Source
from .trace import Columns


class Format(NamedTuple):
    """One way to write a trace down."""

    about: str  # whose it is, for the help
    fits: Callable[[Source], bool]  # whether the content looks like it
    read: Callable[[Source], Columns]
    order: str = "sort"  # rows out of order are sorted, or refused
    shift: bool = False  # times are of the calendar: count from the first


def csv_with(*columns: str) -> Callable[[Source], bool]:
    """Return a test for a CSV that has these columns."""
    return lambda source: source.kind == "csv" and source.header >= set(columns)


def json_with(*keys: str) -> Callable[[Source], bool]:
    """Return a test for JSON whose first object has these keys."""
    return lambda source: source.kind == "json" and source.header >= set(keys)


def recognised(source: Source) -> str:
    """Return the name of the first format that fits."""
    for name, format in FORMATS.items():
        if format.fits(source):
            return name
    if source.columns:
        return "servesim"
    has = f"{source.kind} with {', '.join(sorted(source.header))[:160]!r}"
    raise BadInput(f"{source.name}: row 1: not a trace format known here ({has}): expected one of {', '.join(FORMATS)}")


def _ours(source: Source) -> bool:
    return any(source.header >= {prompt, output} for prompt, output in OUR_LENGTHS)


OUR_LENGTHS = (("prompt_tokens", "output_tokens"), ("prompt", "output"))

# Tried in this order: a format with fewer keys comes after the one that has them and more.
FORMATS: dict[str, Format] = {
    "servesim": Format("our own CSV or JSONL", _ours, ours, order="refuse"),
    "vidur": Format(
        "Vidur trace_replay",
        csv_with("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
        lambda source: flat(
            source, {"arrival": "arrived_at", "prompt": "num_prefill_tokens", "output": "num_decode_tokens"}
        ),
    ),
    "vidur-lengths": Format(
        "Vidur length pairs",
        csv_with("num_prefill_tokens", "num_decode_tokens"),
        lambda source: flat(
            source, {"arrival": "arrival_time", "prompt": "num_prefill_tokens", "output": "num_decode_tokens"}
        ),
    ),
}

"""Load a trace from a file of any known format."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Optional

from servesim.core import BadInput
from servesim.files.read import PathLike
from servesim.traces.edit import slice_time
from servesim.traces.trace import Trace, build_trace

from .formats import FORMATS, detect_format
from .source import Source
from .tokens import Tokenizer, token_counter


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Turn the garbage collector off while many long-lived objects are created: it would scan them repeatedly."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def load(
    path: PathLike,
    format: Optional[str] = None,
    columns: Optional[Mapping[str, str]] = None,
    limit: Optional[int] = None,
    tokenizer: Optional[Tokenizer] = None,
    *,
    unit: Optional[str] = None,
    sort: bool = False,
    seed: int = 0,
    window: tuple[float, float] = (0.0, math.inf),
) -> Trace:
    """Return the trace in a file; without `format`, the content is used to detect it.

    `columns`: field -> column name (`{"prompt": "tokens_in"}`). `unit`: unit of times (s, ms, us, ns). `limit`:
    maximum number of requests. `window`: first and last second to keep. `sort`: sort rows of a servesim file by
    arrival instead of refusing it. `seed`: for formats that are sampled.
    """
    if format is not None and format not in FORMATS:
        raise BadInput(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    if limit is not None and limit < 1:
        raise BadInput(f"limit: expected at least 1 request, got {limit}")
    source = Source(path, columns, unit, token_counter(tokenizer), seed, window)
    with gc_disabled():
        name = format or detect_format(source)
        chosen = FORMATS[name]
        trace = build_trace(chosen.read(source), source.name, name, "sort" if sort else chosen.order, chosen.shift)
    if window != (0.0, math.inf) and name != "servegen":
        trace = slice_time(trace, *window)
    if limit is not None:
        trace.requests = trace.requests[:limit]
    return trace

"""Load a trace from a file of any known format."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Optional

from servesim.core import BadInput
from servesim.files.read import PathLike
from servesim.traces.edit import cut
from servesim.traces.trace import Trace, assemble

from .formats import FORMATS, recognised
from .source import Source
from .tokens import Tokenizer, counter


@contextmanager
def collector_off() -> Iterator[None]:
    """Make many objects that will stay without the garbage collector counting them over and over."""
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
    """Return the trace in a file; its format is recognised from the content unless it is named.

    `columns` says which column holds a field (`{"prompt": "tokens_in"}`), `unit` in what its times are (s, ms, us,
    ns), `limit` how many requests to keep, `window` from which second to which. `sort` puts rows in order that our
    own format would be refused for. `seed` is for formats that are sampled.
    """
    if format is not None and format not in FORMATS:
        raise BadInput(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    if limit is not None and limit < 1:
        raise BadInput(f"limit: expected at least 1 request, got {limit}")
    source = Source(path, columns, unit, counter(tokenizer), seed, window)
    with collector_off():
        name = format or recognised(source)
        chosen = FORMATS[name]
        trace = assemble(chosen.read(source), source.name, name, "sort" if sort else chosen.order, chosen.shift)
    if window != (0.0, math.inf) and name != "servegen":
        trace = cut(trace, *window)
    if limit is not None:
        trace.requests = trace.requests[:limit]
    return trace

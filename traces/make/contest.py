"""The contest's workload: requests as performance_serving's test client sends them.

It sends int(T*X) requests, in the order of its data set and from the start again where that ends. Its gaps are no
Poisson process: 1/X is rounded to hundredths of a second, and each gap is a Poisson-distributed count of
milliseconds about that, which is nearly constant (CV 0.022 at X=0.5, 0.316 at X=100).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional, Union

from servesim.core import BadInput
from servesim.files.read import PathLike, shown
from servesim.traces.read.columns import ours
from servesim.traces.read.source import Source
from servesim.traces.read.tokens import BOS, Tokenizer, counter
from servesim.traces.trace import Columns, Trace, assemble

from .arrivals import contest_arrivals
from .lengths import contest_lengths

SERVER_DEFAULT = 300  # max_new_tokens where the client names none, as it does for an empty reference answer
MOST = 10**8  # requests

Lengths = Union[PathLike, Sequence[tuple[int, int]]]  # a file, or (prompt, output) pairs


def contest(
    X: float,
    T: float,
    seed: int = 0,
    lengths: Optional[Lengths] = None,
    dispatch: float = 0.0,
    tokenizer: Optional[Tokenizer] = None,
) -> Trace:
    """Return the requests of `-X X -T T`.

    `lengths` is a lengths CSV, the data set itself (alpaca json, with a tokenizer), or pairs; without it they are drawn
    from quantiles of the real ones. `dispatch` is how much longer than drawn each gap is in reality: about 0.0032 s
    at X=5, 0.004 s at X=150.
    """
    X, T, dispatch = _number("X", X), _number("T", T), _number("dispatch", dispatch, zero=True)
    if int(T * X) < 1:
        raise BadInput(f"contest: X*T: expected at least one request, got {X:g}*{T:g}")
    count = int(T * X)
    if count > MOST:
        raise BadInput(f"contest: X*T: expected at most {MOST:,} requests, got {count:,}")
    columns = _columns(lengths, count, seed, tokenizer)
    columns.arrival = list(contest_arrivals(count, X, seed, dispatch).tolist())
    return assemble(columns, f"contest X={X:g} T={T:g} seed={seed}", "contest")


def _number(name: str, value: float, zero: bool = False) -> float:
    if type(value) not in (int, float) or not (0 < value < math.inf or (zero and value == 0)):
        raise BadInput(
            f"contest: {name}: expected a number {'of 0 or more' if zero else 'above 0'}, got {shown(value)}"
        )
    return float(value)


def _columns(lengths: Optional[Lengths], count: int, seed: int, tokenizer: Optional[Tokenizer]) -> Columns:
    if lengths is None:
        return contest_lengths(count, seed)
    if isinstance(lengths, Sequence) and not isinstance(lengths, str):
        found = Columns([prompt for prompt, _ in lengths], [output for _, output in lengths])
    else:
        source = Source(lengths, count=counter(tokenizer))
        if "instruction" in source.header:
            found = _alpaca(source, tokenizer)
        else:
            found = ours(source)
    return _wrapped(found, count)


def _wrapped(found: Columns, count: int) -> Columns:
    """Return the first `count` of an endless repetition; an empty answer means that the server's default holds."""
    if not found.prompt:
        raise BadInput("contest: lengths: expected at least one pair, got none")
    limits = found.limit or [None] * len(found.prompt)
    rows = [k % len(found.prompt) for k in range(count)]
    return Columns(
        prompt=[found.prompt[k] for k in rows],
        output=[found.output[k] or SERVER_DEFAULT for k in rows],
        limit=[limits[k] or found.output[k] or SERVER_DEFAULT for k in rows],
    )


def _alpaca(source: Source, tokenizer: Optional[Tokenizer]) -> Columns:
    """Return the lengths of a data set of instruction, input and reference output."""
    if tokenizer is None:
        raise BadInput(f"{source.name}: lengths from text need a tokenizer: name a tokenizer.model")
    prompts, outputs = [], []
    for i, record in enumerate(source.records):
        instruction, context, output = (record.get(key, "") for key in ("instruction", "input", "output"))
        for key, value in (("instruction", instruction), ("input", context), ("output", output)):
            if type(value) is not str:
                raise BadInput(f"{source.name}: row {source.numbers[i]}: {key}: expected text, got {shown(value)}")
        prompts.append(BOS + source.count(f"{instruction}:{context}" if context else instruction))
        outputs.append(source.count(output))
    return Columns(prompts, outputs)

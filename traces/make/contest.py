"""The contest's workload: requests as the client of performance_serving sends them.

The client sends int(T*X) requests in the order of its data set, and repeats the data set if it is too short. Arrivals
are not a Poisson process. The client rounds 1/X to hundredths of a second; each gap is a Poisson-distributed number of
milliseconds with this mean. The gaps are nearly constant: their CV is 0.022 at X=0.5 and 0.316 at X=100.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, Union

from servesim.core import BadInput
from servesim.core.limits import MAX_NUMBER, MAX_RATE, MAX_REQUESTS, MAX_SECONDS, MIN_RATE, is_number
from servesim.files.read import PathLike, quote
from servesim.traces.read.columns import servesim_columns
from servesim.traces.read.source import Source
from servesim.traces.read.tokens import BOS, Tokenizer, token_counter
from servesim.traces.trace import Columns, Trace, build_trace

from .arrivals import contest_arrivals
from .lengths import contest_lengths

SERVER_DEFAULT = 300  # max_new_tokens of the server; the client sends none if the reference output is empty

Lengths = Union[PathLike, Sequence[tuple[int, int]]]  # a file, or (prompt, output) pairs


def contest(
    X: float,
    T: float,
    seed: int = 0,
    lengths: Optional[Lengths] = None,
    send_overhead: float = 0.0,
    tokenizer: Optional[Tokenizer] = None,
) -> Trace:
    """Return the requests that the client sends with `-X X -T T`.

    `lengths` is a CSV file of lengths, the data set itself (alpaca JSON, with a tokenizer), or a list of pairs. By
    default, lengths are drawn from quantiles of the real ones. `send_overhead` is the seconds that the client adds to
    each gap: about 0.0032 s at X=5, 0.004 s at X=150.
    """
    X, T = _number("X", X, MAX_RATE), _number("T", T, MAX_NUMBER)
    send_overhead = _number("send_overhead", send_overhead, MAX_SECONDS, zero=True)
    if int(T * X) < 1:
        raise BadInput(f"workload.contest: X*T: expected at least one request, got {X:g}*{T:g}")
    count = int(T * X)
    if count > MAX_REQUESTS:
        raise BadInput(f"workload.contest: X*T: expected at most {MAX_REQUESTS:,} requests, got {count:,}")
    columns = _read_lengths(lengths, count, seed, tokenizer)
    columns.arrival = list(contest_arrivals(count, X, seed, send_overhead).tolist())
    return build_trace(columns, f"contest X={X:g} T={T:g} seed={seed}", "contest")


def _number(name: str, value: float, maximum: float, zero: bool = False) -> float:
    minimum, what = (0.0, "of 0 or more") if zero else (MIN_RATE, "above 0")
    if not is_number(value, minimum, maximum):
        expected = f"a number {what}, from {minimum:g} to {maximum:g}"
        raise BadInput(f"contest: {name}: expected {expected}, got {quote(value)}")
    return float(value)


def _read_lengths(lengths: Optional[Lengths], count: int, seed: int, tokenizer: Optional[Tokenizer]) -> Columns:
    if lengths is None:
        return contest_lengths(count, seed)
    if isinstance(lengths, Sequence) and not isinstance(lengths, str):
        columns = Columns([prompt for prompt, _ in lengths], [output for _, output in lengths])
    else:
        source = Source(lengths, count=token_counter(tokenizer))
        if "instruction" in source.header:
            columns = _alpaca_lengths(source, tokenizer)
        else:
            columns = servesim_columns(source)
    return _repeat(columns, count)


def _repeat(columns: Columns, count: int) -> Columns:
    """Return `count` rows, repeating the columns; an empty output becomes the server's default limit."""
    if not columns.prompt:
        raise BadInput("contest: lengths: expected at least one pair, got none")
    limits = columns.limit or [None] * len(columns.prompt)
    rows = [k % len(columns.prompt) for k in range(count)]
    return Columns(
        prompt=[columns.prompt[k] for k in rows],
        output=[columns.output[k] or SERVER_DEFAULT for k in rows],
        limit=[limits[k] or columns.output[k] or SERVER_DEFAULT for k in rows],
    )


def _alpaca_lengths(source: Source, tokenizer: Optional[Tokenizer]) -> Columns:
    """Return the lengths of a data set of instruction, input and reference output."""
    if tokenizer is None:
        raise BadInput(f"{source.name}: holds text; set `tokenizer` to a tokenizer.model to count its tokens")
    prompts, outputs = [], []
    for i, record in enumerate(source.records):
        instruction, context, output = (record.get(key, "") for key in ("instruction", "input", "output"))
        for key, value in (("instruction", instruction), ("input", context), ("output", output)):
            if type(value) is not str:
                raise BadInput(f"{source.name}: row {source.numbers[i]}: {key}: expected text, got {quote(value)}")
        prompts.append(BOS + source.count(f"{instruction}:{context}" if context else instruction))
        outputs.append(source.count(output))
    return Columns(prompts, outputs)

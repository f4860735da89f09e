"""The contest's workload: requests as the client of performance_serving sends them.

The client sends int(T*X) requests in the order of its data set, and repeats the data set if it is too short. Arrivals
are not a Poisson process. The client rounds 1/X to hundredths of a second; each gap is a Poisson-distributed number of
milliseconds with this mean. The gaps are nearly constant: their CV is 0.022 at X=0.5 and 0.316 at X=100.
"""

from __future__ import annotations

from typing import Optional

from servesim.core import BadInput
from servesim.core.limits import MAX_REQUESTS
from servesim.files.read import PathLike, quote
from servesim.traces.read.columns import servesim_columns
from servesim.traces.read.source import Source
from servesim.traces.read.tokens import BOS, Tokenizer, token_counter
from servesim.traces.trace import Columns, Trace, build_trace

from .arrivals import contest_arrivals
from .lengths import contest_lengths

SERVER_DEFAULT = 300  # max_new_tokens of the server; the client sends none if the reference output is empty


def contest(
    X: float,
    T: float,
    seed: int = 0,
    lengths: Optional[PathLike] = None,
    send_overhead: float = 0.0,
    tokenizer: Optional[Tokenizer] = None,
) -> Trace:
    """Return the requests that the client sends with `-X X -T T`. The keys of a workload have checked the numbers.

    `lengths` is a CSV file of lengths, or the data set itself (alpaca JSON, with a tokenizer). By default, lengths are
    drawn from quantiles of the real ones. `send_overhead` is the seconds that the client adds to each gap: about
    0.0032 s at X=5, 0.004 s at X=150.
    """
    count = int(T * X)
    if count < 1:
        raise BadInput(f"workload.contest: X*T: expected at least one request, got {X:g}*{T:g}")
    if count > MAX_REQUESTS:
        raise BadInput(f"workload.contest: X*T: expected at most {MAX_REQUESTS:,} requests, got {count:,}")
    columns = contest_lengths(count, seed) if lengths is None else _read_lengths(lengths, count, tokenizer)
    columns.arrival = list(contest_arrivals(count, X, seed, send_overhead).tolist())
    return build_trace(columns, f"contest X={X:g} T={T:g} seed={seed}", "contest")


def _read_lengths(lengths: PathLike, count: int, tokenizer: Optional[Tokenizer]) -> Columns:
    source = Source(lengths, count=token_counter(tokenizer))
    if "instruction" in source.header:
        return _repeat(_alpaca_lengths(source, tokenizer), count)
    return _repeat(servesim_columns(source), count)


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

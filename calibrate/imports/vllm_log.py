"""Read the steps in a log of vLLM (`--enable-logging-iteration-details`).

    INFO 11-16 18:20:01 [loggers.py:205] Engine 000: Iteration(12): 1 context requests, 512 context tokens,
    7 generation requests, 7 generation tokens, iteration elapsed time: 21.37 ms, CPU KV cache usage: 1.2%

vLLM's timer starts after the scheduling and the start of the model call, and stops before the results are processed.
The host time that it leaves out follows from the time stamps of the lines: while the engine is busy, the time between
two lines is that of the steps between them. Stamps have whole seconds by default, so the first lines of two seconds
are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
from servesim.calibrate.probe.solver import nonneg_least_squares
from servesim.core import BadInput, Shape
from servesim.core.limits import MAX_COST, MAX_NUMBER
from servesim.costs.parts import NO_HOST, HostPart
from servesim.files.read import read_text

from .step_log import TimedStep

STEP = re.compile(
    r"Iteration\((\d{1,15})\): (\d{1,15}) context requests, (\d{1,15}) context tokens, (\d{1,15}) generation requests, "
    r"(\d{1,15}) generation tokens, iteration elapsed time: (\d{1,15}(?:\.\d{1,15})?) ?ms(?! \(dummy\))"
)
STAMP = re.compile(r"(\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")  # a year before it is not used
ENGINE = re.compile(r"Engine (\d{1,9}): $")
MIN_RATIO = 0.05  # of short to long decode steps; their true times differ less
MIN_GAPS = (
    5  # new stamps without a pause: of shorter stretches, slow ones are seen more often, and the mean is too long
)


class LoggedIteration(NamedTuple):
    """One line of the log."""

    engine: str
    number: int
    stamp: Optional[float]  # seconds since the start of a year
    seconds: float  # of vLLM's timer
    shape: Shape


class VllmLog(NamedTuple):
    """The steps of a log."""

    steps: list[TimedStep]  # with host time, if it is known
    host: Optional[HostPart]  # None: the log does not show it

    @property
    def about_host(self) -> str:
        """The host time as text."""
        if self.host is None:
            return f"missing: the engine was never busy for {MIN_GAPS} changes of the time stamp"
        terms = f"{1e3 * self.host.step:.3g} ms per step and {1e3 * self.host.row:.3g} ms per row"
        return f"{terms}, from the time stamps of the log"


def read_vllm_log(path: Path, mean_context: float = 0.0) -> VllmLog:
    """Return all steps of a log; other lines are skipped. Prompts of one step are taken as equally long.

    The log has no context lengths: `mean_context` is the mean number of cached tokens of a decoding request, if known.
    """
    lines = list(read_iterations(path, mean_context))
    check_durations(path, lines)
    host = host_time(lines)
    added = host or NO_HOST
    return VllmLog([TimedStep(line.shape, line.seconds + added.seconds(rows_of(line.shape))) for line in lines], host)


def read_iterations(path: Path, mean_context: float) -> Iterator[LoggedIteration]:
    """Yield the lines with steps."""
    for number, line in enumerate(read_text(path).splitlines(), 1):
        match = STEP.search(line)
        if match is None:
            continue
        prompts, tokens, requests, generated = map(int, match.groups()[1:5])
        if prompts > tokens or bool(prompts) != bool(tokens) or max(prompts, tokens, requests, generated) > MAX_NUMBER:
            raise BadInput(f"{path}: row {number}: expected at least one context token per context request")
        seconds = float(match[6]) / 1e3
        if (tokens or requests) and 0 < seconds <= MAX_COST:
            engine = ENGINE.search(line[: match.start()])
            shape = step_shape(prompts, tokens, requests, generated, mean_context)
            yield LoggedIteration(engine[1] if engine else "", int(match[1]), stamp_of(line), seconds, shape)


def step_shape(prompts: int, tokens: int, requests: int, generated: int, mean_context: float) -> Shape:
    """Return the shape of a step.

    vLLM counts a request that continues after a preemption as generation, although the step computes its prompt and
    its earlier output again. The log does not say how many of the requests did: one is assumed.
    """
    squares = round(tokens**2 / prompts) if prompts else 0
    if generated > requests > 0:
        again = generated - requests + 1
        prompts, tokens, squares, requests = prompts + 1, tokens + again, squares + again**2, requests - 1
    return Shape(prompts, tokens, tokens, squares, 0, requests, requests, round(requests * mean_context))


def stamp_of(line: str) -> Optional[float]:
    """Return the time of a line in seconds, None if it has none."""
    found = STAMP.search(line)
    if found is None:
        return None
    try:
        time = datetime.strptime(f"2000-{found[1]} {found[2]}", "%Y-%m-%d %H:%M:%S")  # 2000 has a 29 February
    except ValueError:
        return None
    return (time - datetime(2000, 1, 1)).total_seconds() + float(f"0.{found[3] or 0}")


def host_time(lines: Sequence[LoggedIteration]) -> Optional[HostPart]:
    """Return the host time per step and per row that vLLM's timer leaves out; None if too few stamps show it."""
    engines = {line.engine for line in lines}
    stretches = [s for name in engines for s in busy_stretches([line for line in lines if line.engine == name])]
    found = [list(host_gaps(stretch)) for stretch in stretches]
    gaps = np.array([gap for gaps in found if len(gaps) >= MIN_GAPS for gap in gaps])
    if not len(gaps):
        return None
    return HostPart(*nonneg_least_squares(gaps[:, 1:], gaps[:, 0]).tolist())


def busy_stretches(lines: Sequence[LoggedIteration]) -> list[list[LoggedIteration]]:
    """Return the lines in groups without a pause: a step with generation requests starts right after the one before."""
    stretches: list[list[LoggedIteration]] = []
    for before, line in zip((None, *lines), lines):
        follows = before is not None and line.number == before.number + 1 and line.stamp is not None
        if not follows or not line.shape.decode_rows:
            stretches.append([])
        stretches[-1].append(line)
    return stretches


def host_gaps(stretch: Sequence[LoggedIteration]) -> Iterator[tuple[float, int, int]]:
    """Yield the host seconds, the number and the rows of the steps between two new stamps."""
    new = [k for k in range(1, len(stretch)) if stretch[k].stamp != stretch[k - 1].stamp]
    for first, last in zip(new, new[1:]):
        start, end, steps = stretch[first].stamp, stretch[last].stamp, stretch[first + 1 : last + 1]
        if start is not None and end is not None and end > start:  # not at the end of a year
            rest = end - start - sum(step.seconds for step in steps)
            yield rest, len(steps), sum(rows_of(step.shape) for step in steps)


def rows_of(shape: Shape) -> int:
    return shape.prefill_rows + shape.decode_live


def check_durations(path: Path, lines: Sequence[LoggedIteration]) -> None:
    """Raise BadInput if there are no steps, or if their times do not include the device."""
    if not lines:
        raise BadInput(
            f"{path}: expected lines `Iteration(0): 1 context requests, ...` of vLLM with "
            "--enable-logging-iteration-details, got none"
        )
    decodes = [line.seconds for line in lines if not line.shape.prefill_rows] or [line.seconds for line in lines]
    low, high = np.quantile(decodes, [0.1, 0.9])
    if low < MIN_RATIO * high:
        raise BadInput(
            f"{path}: a tenth of the decode steps took less than {low * 1e3:.3g} ms, a tenth over {high * 1e3:.3g} ms: "
            "with asynchronous scheduling, elapsed times do not include the device; log with --no-async-scheduling"
        )

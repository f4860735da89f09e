"""What a trace is like: figures of its arrivals, lengths, shared prefixes and sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import takewhile
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.core import ClientRequest

from .trace import Trace

PERCENTS = (10, 25, 50, 75, 90, 95, 99)
QUANTILES = {"min": 0.0, **{f"p{percent}": percent / 100 for percent in PERCENTS}, "max": 1.0}
WINDOWS = (1, 10, 60)  # seconds over which arrivals are counted
Numbers = NDArray[Any]


def statistics(trace: Trace) -> dict[str, Any]:
    """Return the figures of a trace; None where they make no sense. Times are seconds, lengths tokens."""
    # A request that waits for another's end has no arrival of its own yet.
    free = np.array([request.arrival for request in trace.requests if request.after is None])
    prompts, outputs = trace.prompts, trace.outputs
    span = float(free[-1] - free[0]) if len(free) and trace.timed else None
    limits = sum(request.limit != request.output for request in trace.requests)
    return {
        "source": trace.source,
        "format": trace.format,
        "requests": len(trace),
        "dropped": dict(trace.dropped),
        "chained": len(trace) - len(free),
        "span_s": span,
        "rate": (len(free) - 1) / span if span else None,
        "gap_cv": gap_variation(free) if span else None,
        "dispersion": {str(window): dispersion(free, window) if span else None for window in WINDOWS},
        "prompt": spread(prompts),
        "output": spread(outputs),
        "own_limits": limits,
        "correlation": correlation(prompts, outputs),
        "rank_correlation": correlation(ranks(prompts), ranks(outputs)),
        "prefix": prefixes(trace.requests, trace.block),
        "sessions": sessions(trace.requests),
        "priorities": dict(sorted(Counter(request.priority for request in trace.requests).items())),
    }


def gap_variation(arrivals: Numbers) -> Optional[float]:
    """Return standard deviation over mean of the gaps: 1 for a Poisson process, 0 for a clock."""
    gaps = np.diff(arrivals)
    return float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else None


def dispersion(arrivals: Numbers, window: float) -> Optional[float]:
    """Return variance over mean of the counts in whole windows: 1 for a Poisson process, more where it bursts.

    Unlike the gaps' variation it is not misled by rounded time stamps, if the window is wider than the rounding.
    """
    whole = int((arrivals[-1] - arrivals[0]) // window)
    if whole < 2 or whole > 10**8:
        return None
    places = ((arrivals - arrivals[0]) // window).astype(np.int64)
    counts = np.bincount(places[places < whole], minlength=whole)
    return float(counts.var() / counts.mean()) if counts.mean() > 0 else None


def spread(lengths: Numbers) -> dict[str, float]:
    """Return mean, standard deviation, total and quantiles."""
    quantiles = np.quantile(lengths, list(QUANTILES.values()))
    return {
        "mean": float(lengths.mean()),
        "sd": float(lengths.std()),
        **{name: float(value) for name, value in zip(QUANTILES, quantiles)},
        "total": int(lengths.sum()),
    }


def correlation(one: Numbers, other: Numbers) -> Optional[float]:
    """Return Pearson's coefficient, None where one of them never changes."""
    if len(one) < 2 or one.std() == 0 or other.std() == 0:
        return None
    return float(np.corrcoef(one, other)[0, 1])


def ranks(values: Numbers) -> NDArray[np.float64]:
    """Return ranks, equal values sharing the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse], np.float64)


def prefixes(requests: Iterable[ClientRequest], block: Optional[int]) -> Optional[dict[str, Any]]:
    """Return how much of the prompts an endless prefix cache would have held already; None without hash ids."""
    seen: set[int] = set()
    ids = shared = tokens = total = 0
    for request in requests:
        total += request.prompt
        ids += len(request.prefix)
        leading = sum(1 for _ in takewhile(seen.__contains__, request.prefix))
        shared += leading
        tokens += min(leading * (block or 0), request.prompt)
        seen.update(request.prefix)
    if not ids:
        return None
    share = tokens / total if block else None
    return {"block": block, "ids": ids, "distinct": len(seen), "shared_blocks": shared / ids, "shared_tokens": share}


def sessions(requests: Iterable[ClientRequest]) -> Optional[dict[str, Any]]:
    """Return how many sessions there are and how long they get; None without any."""
    turns = Counter(request.session for request in requests if request.session is not None)
    if not turns:
        return None
    return {"count": len(turns), "mean_turns": turns.total() / len(turns), "most_turns": max(turns.values())}


def described(figures: dict[str, Any]) -> str:
    """Return the figures as lines a person can read."""
    lines = [f"{figures['source']} ({figures['format']})"]
    lines += [f"  {name:<26} {value}" for name, value in _pairs(figures)]
    names = ("mean", "sd", *QUANTILES)
    lines.append("  tokens  " + "".join(f"{name:>8}" for name in names) + f"{'total':>12}")
    for side in ("prompt", "output"):
        cells = "".join(f"{_figure(figures[side][name]):>8}" for name in names)
        lines.append(f"  {side:<8}{cells}{figures[side]['total']:>12}")
    return "\n".join(lines)


def _pairs(figures: dict[str, Any]) -> Iterable[tuple[str, str]]:
    chained = f" ({figures['chained']} wait for another's end)" if figures["chained"] else ""
    yield "requests", f"{figures['requests']}{chained}"
    for why, count in figures["dropped"].items():
        yield "left out", f"{count}: {why}"
    if figures["span_s"] is None:
        yield "arrivals", "all at once, or known only when it runs"
    else:
        yield "span", f"{figures['span_s']:.3f} s"
        yield "rate", f"{_figure(figures['rate'])} requests/s"
        yield "CV of gaps", _figure(figures["gap_cv"])
        yield "index of dispersion", ", ".join(f"{_figure(v)} at {w} s" for w, v in figures["dispersion"].items())
    ranked = _figure(figures["rank_correlation"])
    yield "prompt-output correlation", f"{_figure(figures['correlation'])} (ranks {ranked})"
    if figures["own_limits"]:
        yield "limit above output", f"{figures['own_limits']} requests"
    prefix, sessions = figures["prefix"], figures["sessions"]
    if prefix is not None:
        size = f" of {prefix['block']} tokens" if prefix["block"] else ""
        yield "prefix blocks seen before", f"{prefix['shared_blocks']:.1%} of {prefix['ids']}{size}"
    if sessions is not None:
        turns = f"{_figure(sessions['mean_turns'])} turns on average, at most {sessions['most_turns']}"
        yield "sessions", f"{sessions['count']}, {turns}"
    if len(figures["priorities"]) > 1:
        yield "priorities", ", ".join(f"{level}: {count}" for level, count in figures["priorities"].items())


def _figure(value: Optional[float]) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 10000:
        return f"{value:.0f}"
    return f"{value:.4g}"

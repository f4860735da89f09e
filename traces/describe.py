"""Statistics of a trace: arrivals, lengths, shared prefixes and sessions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.core import ClientRequest

from .reuse import BLOCK_SIZE, prefix_reuse
from .trace import Trace

PERCENTS = (10, 25, 50, 75, 90, 95, 99)
QUANTILES = {"min": 0.0, **{f"p{percent}": percent / 100 for percent in PERCENTS}, "max": 1.0}
WINDOWS = (1, 10, 60)  # seconds over which arrivals are counted
Numbers = NDArray[Any]


def statistics(trace: Trace, block_size: int = BLOCK_SIZE) -> dict[str, Any]:
    """Return the metrics of a trace; None for an undefined one. Times are seconds, lengths are tokens.

    `block_size`: tokens per block of the prefix cache.
    """
    # The arrival of a request that follows another one is not known yet.
    arrivals = np.array([request.arrival for request in trace.requests if request.follows is None])
    prompts, outputs = trace.prompts, trace.outputs
    span = float(arrivals[-1] - arrivals[0]) if len(arrivals) and trace.timed else None
    own_limits = sum(request.limit != request.output for request in trace.requests)
    return {
        "source": trace.source,
        "format": trace.format,
        "requests": len(trace),
        "dropped": dict(trace.dropped),
        "chained": len(trace) - len(arrivals),
        "span_s": span,
        "rate": (len(arrivals) - 1) / span if span else None,
        "gap_cv": gap_variation(arrivals) if span else None,
        "dispersion": {str(window): dispersion(arrivals, window) if span else None for window in WINDOWS},
        "prompt": length_statistics(prompts),
        "output": length_statistics(outputs),
        "own_limits": own_limits,
        "correlation": correlation(prompts, outputs),
        "rank_correlation": correlation(ranks(prompts), ranks(outputs)),
        "prefix": prefix_reuse(trace, block_size),
        "sessions": count_sessions(trace.requests),
        "priorities": dict(sorted(Counter(request.priority for request in trace.requests).items())),
    }


def gap_variation(arrivals: Numbers) -> Optional[float]:
    """Return the coefficient of variation of the gaps: 1 for a Poisson process, 0 for equal gaps."""
    gaps = np.diff(arrivals)
    return float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else None


def dispersion(arrivals: Numbers, window: float) -> Optional[float]:
    """Return variance over mean of the arrivals per full window: 1 for a Poisson process, above 1 for bursts.

    Rounded time stamps distort the variation of gaps, but not this index if the window is wider than the rounding.
    """
    windows = int((arrivals[-1] - arrivals[0]) // window)
    if windows < 2 or windows > 10**8:
        return None
    indices = ((arrivals - arrivals[0]) // window).astype(np.int64)
    counts = np.bincount(indices[indices < windows], minlength=windows)
    return float(counts.var() / counts.mean()) if counts.mean() > 0 else None


def length_statistics(lengths: Numbers) -> dict[str, float]:
    """Return mean, standard deviation, total and quantiles."""
    quantiles = np.quantile(lengths, list(QUANTILES.values()))
    return {
        "mean": float(lengths.mean()),
        "sd": float(lengths.std()),
        **{name: float(value) for name, value in zip(QUANTILES, quantiles)},
        "total": int(lengths.sum()),
    }


def correlation(x: Numbers, y: Numbers) -> Optional[float]:
    """Return Pearson's coefficient, or None if one of the inputs is constant."""
    if len(x) < 2 or x.std() == 0 or y.std() == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def ranks(values: Numbers) -> NDArray[np.float64]:
    """Return ranks; equal values get their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse], np.float64)


def count_sessions(requests: Iterable[ClientRequest]) -> Optional[dict[str, Any]]:
    """Return the number of sessions and their turns; None without sessions."""
    turns = Counter(request.session for request in requests if request.session is not None)
    if not turns:
        return None
    return {"count": len(turns), "mean_turns": turns.total() / len(turns), "most_turns": max(turns.values())}


def format_statistics(metrics: dict[str, Any]) -> str:
    """Return the metrics as text."""
    lines = [f"{metrics['source']} ({metrics['format']})"]
    lines += [f"  {name:<26} {value}" for name, value in _labelled_values(metrics)]
    names = ("mean", "sd", *QUANTILES)
    lines.append("  tokens  " + "".join(f"{name:>8}" for name in names) + f"{'total':>12}")
    for side in ("prompt", "output"):
        cells = "".join(f"{_format_number(metrics[side][name]):>8}" for name in names)
        lines.append(f"  {side:<8}{cells}{metrics[side]['total']:>12}")
    return "\n".join([*lines, *_format_reuse(metrics["prefix"])])


def _format_reuse(prefix: Optional[dict[str, Any]]) -> list[str]:
    """Return the table of hit rates: what a larger prefix cache would find."""
    if prefix is None:
        return []
    lines = [f"  {'prefix cache, blocks':>22}{'tokens':>14}{'hit rate':>10}"]
    lines += [f"  {row['blocks']:>22}{row['tokens']:>14}{row['hit_rate']:>10.1%}" for row in prefix["cache_sizes"]]
    return [*lines, f"  {'unlimited':>22}{'':>14}{prefix['hit_rate']:>10.1%}"]


def _labelled_values(metrics: dict[str, Any]) -> Iterable[tuple[str, str]]:
    chained = f" ({metrics['chained']} start after another request ends)" if metrics["chained"] else ""
    yield "requests", f"{metrics['requests']}{chained}"
    for reason, count in metrics["dropped"].items():
        yield "skipped", f"{count}: {reason}"
    if metrics["span_s"] is None:
        yield "arrivals", "all at once, or not known before the run"
    else:
        yield "span", f"{metrics['span_s']:.3f} s"
        yield "rate", f"{_format_number(metrics['rate'])} requests/s"
        yield "CV of gaps", _format_number(metrics["gap_cv"])
        indices = (f"{_format_number(value)} at {window} s" for window, value in metrics["dispersion"].items())
        yield "index of dispersion", ", ".join(indices)
    of_ranks = _format_number(metrics["rank_correlation"])
    yield "prompt-output correlation", f"{_format_number(metrics['correlation'])} (ranks {of_ranks})"
    if metrics["own_limits"]:
        yield "limit above output", f"{metrics['own_limits']} requests"
    prefix, sessions = metrics["prefix"], metrics["sessions"]
    if prefix is not None:
        if prefix["tokens_per_id"] is not None:
            yield "hash ids", f"{prefix['tokens_per_id']} tokens each"
        size = f"{prefix['blocks']} prompt blocks of {prefix['block_size']} tokens"
        yield "blocks seen before", f"{prefix['seen_blocks']:.1%} of {size}"
    if sessions is not None:
        turns = f"{_format_number(sessions['mean_turns'])} turns on average, at most {sessions['most_turns']}"
        yield "sessions", f"{sessions['count']}, {turns}"
    if len(metrics["priorities"]) > 1:
        yield "priorities", ", ".join(f"{level}: {count}" for level, count in metrics["priorities"].items())


def _format_number(value: Optional[float]) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or abs(value) >= 10000:
        return f"{value:.0f}"
    return f"{value:.4g}"

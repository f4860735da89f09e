"""The answer of `sim recommend` as one screen, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Optional

from servesim.costs.derivation import EXPECTED_ERRORS, MXFP4_ERRORS
from servesim.files.terminal import align_columns
from servesim.runs.metric_table import format_quantity, metric_title, unit_of
from servesim.runs.request_rate import format_rate
from servesim.statistics.constraints import Bound, parse_bounds

from .fleet_question import POOLS, Fleet, name_of
from .ranking import Row
from .rates import Curve
from .recommend import Answer

SHOWN = ("p99_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "request_goodput")
HITS = "prefix_hit_rate"
COST = "cost_per_million_tokens"  # shown if the user gives the price of a device
MIN_ERROR = 0.05  # of a latency, if only other errors are known
MIN_SHARE = 0.01  # of the real value that a prediction has at least
EQUAL = "Other settings are as good at this load; these hold more"


def answer_text(answer: Answer, command: str, next_command: str, router: str) -> str:
    """Return the answer as one screen; `command` starts a server with the recommended settings, `router` a router."""
    fleet, subject = answer.fleet, "it"
    lines = [verdict_line(answer), "", command.rstrip(), "", *result_table(answer), ""]
    if fleet is not None:
        settings, subject = settings_text(answer), "one replica"
        lines = [fleet_line(answer, fleet), f"Settings of each replica: {settings or 'the defaults'}.", ""]
        lines += [command.rstrip(), router, "", *fleet_table(answer, fleet), ""]
    limit = f"What limits {subject} (at {format_rate(answer.limit_rate)}): {answer.limit.text}."
    lines += [] if answer.drafts is None else [answer.drafts.text]
    return "\n".join([*lines, limit, error_line(answer), f"Next: {next_command}"])


def answer_json(answer: Answer, command: str, router: str) -> dict[str, Any]:
    """Return the answer as JSON; docs/recommend.md describes the keys."""
    bests = {"recommended": (answer.best, answer.best_load), "defaults": (answer.defaults, answer.defaults_load)}
    return {
        "rate": answer.rate,
        "constraints": list(answer.question.constraints),
        "meets": answer.holds,
        "settings": dict(answer.changed),
        "command": command,
        **({} if answer.fleet is None else fleet_json(answer.fleet, router)),
        **{
            name: {
                **{metric: None if math.isnan(row.mean(metric)) else row.mean(metric) for metric in SHOWN},
                "highest_rate": None if curve is None or curve.capacity is None else curve.capacity.rate,
            }
            for name, (row, curve) in bests.items()
        },
        **({} if answer.drafts is None else {"speculation": asdict(answer.drafts)}),
        "limit": answer.limit.kind,
        "limit_text": answer.limit.text,
        "expected_error": expected_errors(answer),
    }


def fleet_json(fleet: Fleet, command: str) -> dict[str, Any]:
    """Return the replicas, and the metrics of their routers."""
    metrics = [*SHOWN, HITS, COST]
    tested = {name_of(row): {name: row.mean(name) for name in metrics if row.values(name)} for row in fleet.rows}
    pools = {"pools": list(fleet.pools)} if fleet.pools else {}
    return {"replicas": fleet.replicas, "router": fleet.router, **pools, "router_command": command, "fleets": tested}


def verdict_line(answer: Answer) -> str:
    """Return the recommended settings, and whether they meet the limits at the rate of the question."""
    settings = settings_text(answer)
    at = f"{answer.rate:.4g} req/s"
    choice = f"Best settings at {at}: {settings}." if settings else f"The defaults are the best settings at {at}."
    limits = " and ".join(map(str, answer.question.constraints))
    if not limits:
        return choice
    if answer.best.eligible:
        return f"{choice} They meet {limits}.{f' {EQUAL}.' if answer.for_load else ''}"
    return (
        f"No tested setting meets {limits} at {at}. The highest load within the limits: {settings or 'the defaults'}."
    )


def settings_text(answer: Answer) -> str:
    """Return the settings that differ from the defaults."""
    return ", ".join(
        f"{key.removeprefix('policy.').replace('.', ' ')} {value}" for key, value in answer.changed.items()
    )


def fleet_line(answer: Answer, fleet: Fleet) -> str:
    """Return how many replicas hold the load behind which router, and by what one less misses it."""
    limits = " and ".join(map(str, answer.question.constraints)) or "a backlog that does not grow"
    at, load = f"{answer.rate:.4g} req/s", load_text(answer.best_load)
    one = f"One replica holds {load} req/s within {limits}. " if answer.best_load is not None else ""
    if not fleet.holds:
        return f"{one}{fleet.replicas} replicas do not hold {at}: {problem_of(fleet.best)}."
    fewer = "" if fleet.fewer is None else f" With {fleet.replicas - 1}, {problem_of(fleet.fewer)}."
    apart = f" as {name_of(fleet.best)}" if fleet.pools else ""
    return f"{one}{fleet.replicas} replicas{apart} behind {fleet.router} hold {at}.{fewer}"


def problem_of(row: Row) -> str:
    """Return why the best row does not hold the load."""
    return f"the best one {', '.join(row.misses)}" if row.misses else "the backlog grows"


def fleet_table(answer: Answer, fleet: Fleet) -> list[str]:
    """Return the metrics of the routers, and of prefill and decode apart, side by side."""
    head = f"{fleet.replicas} replicas at {answer.rate:.4g} req/s"
    titles = [*(name_of(row) + " *" * (row is fleet.best) for row in fleet.rows)]
    if not any(POOLS in row.assignment for row in fleet.rows):
        head += ", prefill and decode together"
    hits = [HITS] if any(any(row.values(HITS)) for row in fleet.rows) else []
    return align_columns([[head, *titles], *metric_rows([*SHOWN, *hits, COST], fleet.rows)])


def metric_rows(metrics: Sequence[str], rows: Sequence[Row]) -> list[list[str]]:
    """Return the lines of a table: the metrics that some rows have."""
    lines = []
    for metric in metrics:
        means = [row.mean(metric) for row in rows]
        if not all(map(math.isnan, means)):
            unit = unit_of(metric, means)
            lines.append([unit.after(metric_title(metric)), *(format_quantity(mean, None, unit) for mean in means)])
    return lines


def result_table(answer: Answer) -> list[str]:
    """Return the metrics of the recommended settings beside those of the engine's defaults."""
    rows = [[f"at {answer.rate:.4g} req/s", "recommended" if answer.changed else "defaults", "defaults"]]
    rows += metric_rows([*SHOWN, COST], (answer.best, answer.defaults))
    if answer.best_load is not None:
        rows.append(["Highest load (req/s)", *map(load_text, (answer.best_load, answer.defaults_load))])
    return align_columns(rows if answer.changed else [row[:2] for row in rows])


def load_text(curve: Optional[Curve]) -> str:
    """Return the highest load of a configuration that meets the limits."""
    capacity = None if curve is None else curve.capacity
    return "–" if capacity is None else capacity.text.replace(" req/s", "")


def expected_errors(answer: Answer) -> dict[str, float]:
    """Return the expected errors: of metrics for a derived profile, of step times that a fit did not use otherwise.

    There are none for a derived profile of another engine than vLLM: no run of others was predicted with one.
    """
    derived = answer.profile.about.get("derived")
    if not derived:
        return answer.profile.mean_errors
    if answer.scenario.policy.get("name") != "vllm-v1":
        return {}
    unpacks = answer.profile.about.get("dtype") == "mxfp4" and "precision" in derived["changed"]
    return MXFP4_ERRORS if unpacks else EXPECTED_ERRORS


def error_line(answer: Answer) -> str:
    """Return the expected error, and whether the limits are farther away than it."""
    errors, derived = expected_errors(answer), answer.profile.about.get("derived")
    if not errors and derived:
        return "Expected error: not known: derived step times were compared with runs of vLLM only. Measure first."
    if not errors:
        return f"Expected error: not known, profile {answer.profile.name} has no check."
    source = f"profile {answer.profile.name}"
    if derived:
        source = "medians of 25 runs of vLLM by others, docs/proof.md"
    if errors is MXFP4_ERRORS:
        source = "medians of 38 loads of gpt-oss-120b by others, docs/derive.md"
    parts = ", ".join(f"{name.upper() if derived else name} {100 * error:.1f} %" for name, error in errors.items())
    bounds = [bound for bound in parse_bounds(answer.question.constraints) if not bound.of_baseline]
    best = answer.best if answer.fleet is None else answer.fleet.best
    close = [bound for bound in bounds if is_close(bound, best.mean(bound.metric), errors)]
    text = f"Expected error: {parts} ({source})"
    if not bounds:
        return f"{text}."
    return f"{text}; {close[0]} is within it: measure first." if close else f"{text}; the limits are outside of it."


def is_close(bound: Bound, value: float, errors: dict[str, float]) -> bool:
    """Whether the real value may be on the other side of a bound; an error is (predicted - real) / real."""
    error = next((size for name, size in errors.items() if name in bound.metric), max(MIN_ERROR, *errors.values()))
    return bound.verdict(value / (1 + error), value / max(MIN_SHARE, 1 - error)) == "undecided"

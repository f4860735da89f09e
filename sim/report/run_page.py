"""report.html of a run: its main metrics, what limits it, the time of a request, queues, KV blocks and replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np
from servesim.core import BadInput
from servesim.runs.intervals import format_interval
from servesim.runs.leading import leading_metrics
from servesim.runs.metric_table import METRICS, is_metric
from servesim.runs.replicas import COLUMNS as REPLICA_HEADS
from servesim.runs.replicas import cell_text, shown_columns
from servesim.runs.run_folder import RunData, latencies_of
from servesim.runs.simulate import simulate
from servesim.runs.timeline import QueueLog, ServerState
from servesim.statistics.number_format import format_metric
from servesim.study.columns import Column

from .charts import Latencies, latency_charts, queue_charts, replica_charts, time_chart
from .page import MetricFact, ResultCard, Table, exported_server, page_table, setting_chips, write_page
from .recorded_runs import QUANTILES, RecordedRun
from .sweep_page import describe_times
from .trust import CHECK, GOOD, Fact, facts_of_scenarios, policy_fact

ROLE = "this run"
FACTS = ("mean_ttft_ms", "mean_tpot_ms", "output_throughput", "completed", "failed", "preemptions", "prefix_hit_rate")


def write_run_report(run: RunData, path: Path) -> None:
    """Write the page."""
    slo = {} if run.scenario is None else run.scenario.slo.seconds()
    log, seconds, replicas = queue_log(run), run.result.get("mean_seconds") or {}, run.result.get("replicas") or []
    write_page(
        path, "run.html", title=f"Run: {run.name}", about=describe_requests(run), trust=trust(run), result=result(run),
        latencies=latency_charts([Latencies(ROLE, "@front", quantiles(run))], slo, showlegend=False),
        times=[time_chart([(ROLE, seconds)])] if any(seconds.values()) else [],
        queues=[] if log is None else queue_charts([RecordedRun(ROLE, log)]), table=metric_table(run),
        replicas=replica_table(replicas),
        loads=[] if log is None else replica_charts(log, [str(row["name"]) for row in replicas]),
    )  # fmt: skip


def describe_requests(run: RunData) -> str:
    """Return the line below the title."""
    done = sum(row["outcome"] == "finished" for row in run.requests.values())
    policy = "" if run.scenario is None else f" Policy {run.scenario.policy['name']}."
    if run.scenario is not None and run.scenario.cluster is not None:
        policy += f" Replicas: {run.scenario.cluster.size}, router {run.scenario.cluster.router['name']}."
    return f"{len(run.requests):,} requests, {done:,} finished.{policy}"


def result(run: RunData) -> ResultCard:
    """Return the leading metrics, and what limits the run."""
    tree = {} if run.scenario is None else run.scenario.model_dump(mode="json")
    leading = leading_metrics(tree, arrivals=[float(row["arrival"]) for row in run.requests.values()])
    first, *others = [name for name in dict.fromkeys([*leading, *FACTS]) if run.metric(name) is not None] or [""]
    seconds = run.result.get("mean_seconds") or {}
    facts = [MetricFact(name, metric_text(run, name)) for name in others if run.metric(name) or name in leading]
    return ResultCard(
        "Result of the run", "", True, f"{first} {metric_text(run, first)}" if first else "No request finished.",
        facts=facts, settings=[] if run.scenario is None else setting_chips(run.scenario.policy),
        times=describe_times(seconds) if any(seconds.values()) else "", limit=str(run.result.get("limit_text") or ""),
        server=exported_server(tree) if tree else None,
    )  # fmt: skip


def metric_text(run: RunData, name: str) -> str:
    """Return a metric with its interval, if the run has one."""
    value, limits = run.metric(name), ((run.result.get("intervals") or {}).get("metrics") or {}).get(name)
    return format_metric(value, name) if limits is None or value is None else format_interval(name, value, *limits)


def trust(run: RunData) -> list[Fact]:
    """Return the trust panel: the profile, the policy, and where the times come from."""
    measured = run.sent is not None and bool(run.calls)
    kind = "measured on a device or a server" if measured else "simulated"
    if run.scenario is None:
        return [Fact("Times", kind, CHECK)]
    facts = [Fact("Times", kind)] if measured else facts_of_scenarios([run.scenario])
    intervals = run.result.get("intervals")
    text = f"intervals of {intervals['draws']} draws" if intervals else "no intervals (sim run --intervals adds them)"
    facts.append(Fact("Calibration uncertainty", text, GOOD if intervals else CHECK))
    return [*facts, policy_fact([run.scenario])]


def quantiles(run: RunData) -> dict[str, Sequence[float]]:
    """Return the quantiles of the latencies of the finished requests, in seconds."""
    rows = [row for row in run.requests.values() if row["outcome"] == "finished"]
    known = latencies_of(rows) if rows else {}
    return {key: (np.quantile(values, QUANTILES) / 1e3).tolist() for key, values in known.items() if values}


def queue_log(run: RunData) -> Optional[QueueLog]:
    """Return the queues over time: of the decision log if there is one, else of the same simulation again.

    None for a measured run without a log, and if the requests or the policy cannot be loaded now.
    """
    log = QueueLog()
    if run.decisions:
        blocks = max(line["free"] or 0 for line in run.decisions)
        for line in run.decisions[:: max(1, len(run.decisions) // log.points)]:
            waiting, running, swapped = (len(line[name]) for name in ("waiting", "running", "swapped"))
            log.times.append(line["t"])
            log.queues.append(ServerState(waiting, running, swapped, blocks - (line["free"] or 0)))
    elif run.sent is None and run.scenario is not None:
        try:
            simulate(run.scenario, observers=[log])
        except (BadInput, OSError):
            return None
    return log if log.times else None


def replica_table(rows: Sequence[Mapping[str, Any]]) -> Optional[Table]:
    """Return the metrics of each replica of a fleet."""

    def column(key: str) -> Column:
        return Column(key, lambda row: row.get(key), lambda row: cell_text(row, key), REPLICA_HEADS[key][0], ("page",))

    return page_table([column(key) for key in shown_columns(rows)], rows) if rows else None


def metric_table(run: RunData) -> Table:
    """Return every metric of the run."""
    names = [
        name for name in dict.fromkeys([*METRICS, *run.result]) if is_metric(name) and run.metric(name) is not None
    ]
    columns = [
        Column("metric", str, shown=("page",)),
        Column("value", run.metric, lambda name: metric_text(run, name), shown=("page",)),
    ]
    return page_table(columns, names)

"""The replicas of a run: the metrics of each one, how evenly the load is spread, and which one served a request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Optional

import numpy as np
from servesim.core import Request
from servesim.engine.drafts import draft_metrics
from servesim.engine.fleet import Fleet
from servesim.engine.kv_cache import PrefixCacheStats
from servesim.engine.replica import Replica
from servesim.traces.trace import values_of

from .request_rows import COLUMNS as REQUEST_COLUMNS
from .request_rows import parts_of, plain, request_columns, sum_in_order
from .run_requests import Column, RunRequests

REPLICA, DRAFTS = "replica", ("drafted", "accepted")  # columns of requests.csv that not all runs have
SHOWN = 8  # replicas in a printed table
COLUMNS = {  # of a printed table: the key of a row -> its head, and what a value is multiplied with
    "name": ("replica", 1), "requests": ("requests", 1), "output_throughput": ("tok/s", 1),
    "mean_ttft_ms": ("TTFT ms", 1), "prefix_hit_rate": ("hits %", 100), "busy": ("busy %", 100),
    "peak_kv_usage": ("peak KV %", 100), "preemptions": ("preempted", 1),
    "draft_acceptance_rate": ("drafts %", 100),
}  # fmt: skip


@dataclass(frozen=True)
class Replicas:
    """The replicas of a fleet with more than one."""

    rows: Sequence[Mapping[str, Any]]  # metrics of each replica; None: it has no such value
    replica_of: Mapping[Any, int]  # by the id of a request
    transfers: Mapping[str, float]  # metrics of the copies between prefill and decode replicas; empty without them

    def name_of(self, id: Any) -> str:
        """Return the replica that served the request with this id; empty if the router did not send it."""
        number = self.replica_of.get(id)
        return "" if number is None else str(self.rows[number]["name"])

    @property
    def busiest(self) -> Mapping[str, Any]:
        """The row of the replica with the longest time in model calls."""
        return max(self.rows, key=lambda row: float(row["busy_s"]))

    @property
    def metrics(self) -> dict[str, Any]:
        """The keys of result.json that only a fleet has."""
        return {
            "busy_imbalance": imbalance([row["busy_s"] for row in self.rows]),
            "request_imbalance": imbalance([row["requests"] for row in self.rows]),
            **self.transfers,
            "replicas": [dict(row) for row in self.rows],
        }


def request_table(
    requests: Sequence[Request], replicas: Optional[Replicas], drafts: bool = False
) -> tuple[Sequence[str], Iterator[Sequence[Sequence[Any]]]]:
    """Return the names and the parts of the columns of requests.csv: with drafts their tokens, in a fleet the replica.

    The columns of a part are lists of equal length.
    """
    table = RunRequests.of(requests)

    def columns(part: slice) -> Sequence[Sequence[Any]]:
        values = request_columns(table, part)
        served = [] if replicas is None else [[replicas.name_of(id) for id in values[0]]]
        return [*values, *(draft_columns(table, part) if drafts else ()), *served]

    names = (*REQUEST_COLUMNS, *(DRAFTS if drafts else ()), *([] if replicas is None else [REPLICA]))
    return names, map(columns, parts_of(table))


def draft_columns(table: RunRequests, part: slice) -> list[list[Optional[int]]]:
    """Return the drafted and accepted tokens of requests; those of one with several answers are not counted."""
    several = [sampling is not None for sampling in values_of(table.asked[part], "sampling")]
    return [
        [None if group else count for group, count in zip(several, table.column(name)[part].tolist())]
        for name in DRAFTS
    ]


def imbalance(loads: Sequence[float]) -> float:
    """Return the largest load relative to the mean; 1 if all are equal."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def replicas_of(fleet: Fleet, requests: Sequence[Request], makespan: float) -> Optional[Replicas]:
    """Return the replicas of a fleet that has run; None for one replica, which is a server as any other."""
    if len(fleet.replicas) == 1:
        return None
    table = RunRequests.of(requests)
    ids = plain(values_of(table.asked, "id"))
    numbers = np.fromiter(map(fleet.replica_of.get, ids, repeat(-1)), np.int64, len(table))
    columns = [table.column(name).copy() for name in ("written", "preemptions")]  # read once, not for each replica
    columns += [table.finished, table.column("first_token") - table.column("sent")]
    parts = [[column[numbers == number] for column in columns] for number in range(len(fleet.replicas))]
    rows = [replica_row(each, fleet.now, part, makespan) for each, part in zip(fleet.replicas, parts)]
    copies = fleet.transfers
    transfers = {} if copies is None else {
        "transfers": copies.count, "transfer_s": copies.seconds, "transfer_bytes": copies.bytes,
    }  # fmt: skip
    return Replicas(rows, fleet.replica_of, transfers)


def replica_row(replica: Replica, end: float, served: Sequence[Column], makespan: float) -> dict[str, Any]:
    """Return the metrics of one replica in a run until `end`; `served`: tokens and so on of its requests, see above."""
    loops, (written, preemptions, finished, ttft) = replica.loops, served
    servers = [loop.server for loop in loops]
    ttft, tokens = ttft[finished & ~np.isnan(ttft)], int(written[finished].sum())
    busy = max(0.0, replica.loop.now - replica.idle_s)
    stats = [server.prefix_cache.stats for server in servers if server.prefix_cache is not None]
    drafts = [server.drafts for server in servers if server.drafts is not None]
    peak = max([server.kv_use.peak_blocks / server.pool.total for server in servers])
    return {
        "name": servers[0].name,
        "requests": replica.sent,
        "completed": int(finished.sum()),
        "output_throughput": tokens / makespan if makespan > 0 else 0.0,
        "mean_ttft_ms": 1e3 * sum_in_order(ttft) / len(ttft) if len(ttft) else None,
        "prefix_hit_rate": hit_rate(stats),
        "busy_s": busy,
        "busy": busy / end if end else 0.0,
        "peak_kv_usage": peak if servers[0].policy.uses_block_pool else None,
        "preemptions": int(preemptions.sum()),
        "model_calls": sum([loop.calls for loop in loops]),
        **draft_metrics(drafts),
    }


def hit_rate(stats: Sequence[PrefixCacheStats]) -> Optional[float]:
    """Return the cached share of the tokens that were looked up in prefix caches; None: no request was."""
    if not any(each.requests for each in stats):
        return None
    return sum(each.hits for each in stats) / max(1, sum(each.queries for each in stats))


def replica_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of replicas that `sim run` prints; that of a large fleet is cut."""
    shown = shown_columns(rows)
    cells = [[COLUMNS[key][0] for key in shown], *([cell_text(row, key) for key in shown] for row in rows[:SHOWN])]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["  ".join(map(str.rjust, line, widths)) for line in cells]
    return [*lines, *([f"and {len(rows) - SHOWN} more"] if len(rows) > SHOWN else [])]


def shown_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns of a table of replicas: those with a value."""
    return [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]


def cell_text(row: Mapping[str, Any], key: str) -> str:
    """Return a value of a replica as text."""
    value, factor = row.get(key), COLUMNS[key][1]
    if value is None:
        return "-"
    return f"{factor * value:.1f}" if isinstance(value, float) else str(value)

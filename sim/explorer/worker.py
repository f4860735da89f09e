"""Runs of the page in a worker process: each run can be cancelled, and tells how far it is.

The worker and the server share one byte (cancelled) and one number (progress) per job. A job is one answer to the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servesim.config.user_code import use_access
from servesim.core import Request
from servesim.engine.server import Server
from servesim.engine.step import Step
from servesim.report.recorded_runs import latency_quantiles
from servesim.runs.run_warnings import run_notes
from servesim.runs.simulate import Run
from servesim.runs.timeline import QueueLog
from servesim.study.executor import exit_with_parent
from servesim.study.single_run import Record, RunContext, Task, run_context
from servesim.traces.trace import Trace, has_field

_shared: list[Any] = []  # the arrays of `join`


class Cancelled(BaseException):
    """The page does not need the run any more. No handler of errors may catch it."""


def join(cancelled: Any, progress: Any) -> None:
    """In a worker, at its start: keep the arrays that it shares with the server."""
    exit_with_parent()
    _shared[:] = [cancelled, progress]


class Watch(QueueLog):
    """Keeps the queues over time, ends a cancelled run, and stores the fraction of the requests that have ended."""

    every_step = False

    def __init__(self, job: int, requests: int) -> None:
        super().__init__()
        self._slot, self._requests, self._ended = job % len(_shared[0]), max(1, requests), 0

    def on_step_start(self, server: Server, step: Step, arrived: Sequence[Request]) -> None:
        if _shared[0][self._slot]:
            raise Cancelled
        super().on_step_start(server, step, arrived)

    def on_step_end(self, server: Server, step: Step, now: float, finished: Sequence[Request]) -> None:
        super().on_step_end(server, step, now, finished)
        if finished:
            self._ended += len(finished)
            _shared[1][self._slot] = self._ended / self._requests


def run_watched(context: str, tasks: list[Task], job: int) -> list[Record]:
    """Return the records of runs; `{}` of those that the page has cancelled."""
    runs = run_context(context)
    with use_access(runs.code):
        return [{} if _shared[0][job % len(_shared[0])] else run_one(runs, task, job) for task in tasks]


def run_one(runs: RunContext, task: Task, job: int) -> Record:
    """Return the record of a run; that of a first replication at the scenario's own rate has what the charts need."""
    try:
        trace = runs.trace(runs.scenario(task), task)
        watch = Watch(job, len(trace))
    except Exception:  # the run has the same error, and reports it
        return runs.run(task)
    detailed = task.replication == 0 and task.rate is None
    try:
        return runs.run(task, [watch], lambda run: details_of(run, trace, watch) if detailed else {})
    except Cancelled:
        return {}


def details_of(run: Run, trace: Trace, watch: Watch) -> Record:
    """Return what the charts of a run show."""
    waits = has_field(trace.requests, "follows")
    blocks = sum(pool.total for _, pool in run.kv_uses)
    return {
        "requests": len(trace),
        "own_rate": None if waits or not trace.span > 0 else (len(trace) - 1) / trace.span,
        "quantiles": latency_quantiles(run.measures),
        "times": watch.times,
        "waiting": [state.waiting + state.swapped for state in watch.queues],
        "running": [state.running for state in watch.queues],
        "kv": [100 * state.blocks_used / blocks for state in watch.queues] if run.kv_metrics else [],
        "limit": run.limit_metrics,
        "notes": run_notes(run.scenario, run.profile, trace),
    }

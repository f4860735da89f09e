"""Runs before a sweep over rates: they choose its rates and the length of its runs.

Above the rate that a server can sustain, the backlog and the waiting times grow until the last request. In a short run
they stay small, so that a rate seems to meet the constraints. A capacity therefore needs long runs. With all requests
at once, a pilot run of each configuration shows how many requests the server runs at the same time. A run is long
enough if it has many times as many requests, and enough requests for a P99. Shorter workloads are made longer: a trace
is repeated, a synthetic workload draws more requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from servesim.core import BadInput
from servesim.core.limits import MAX_RATE, MAX_RUNS, MIN_RATE
from servesim.runs.request_rate import round_rate

from .executor import Executor, run_all
from .experiment import Experiment, load_experiment
from .experiment_file import EXPERIMENT_FILE
from .replications import find_invalid
from .single_run import Record, Task

AUTO_RATES = (0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.5)  # times the throughput of the baseline at overload
OVERLOAD = 1e6  # times the rate of the scenario: all requests arrive at about the same time
LIGHT_LOAD = 1e-3  # times the throughput at overload
MIN_REQUESTS = 10_000  # of all replications: enough for a P99
MIN_TURNOVER = 20  # requests of a run / requests in the server at the same time
MAX_REQUESTS = 200_000  # in a run of a workload that is made longer


def choose_terms(experiment: Experiment, folder: Path, executor: Executor) -> Experiment:
    """Choose the rates of `rates: auto` and the length of the runs; a folder that holds the experiment keeps both."""
    if not experiment.rates and not experiment.auto_rates:
        return experiment
    stored = load_experiment(folder) if (folder / EXPERIMENT_FILE).is_file() else None
    if stored is not None and stored.rates:
        rates = stored.rates if experiment.auto_rates else experiment.rates
        return experiment.changed(rates=rates, auto_rates=False, length=stored.length, unserved=stored.unserved)
    pilots = run_pilots(experiment, executor)
    if experiment.subject_to:  # without constraints, there is no capacity
        while (length := needed_length(experiment, pilots)) > experiment.length:
            experiment = experiment.changed(length=length)
            pilots = run_pilots(experiment, executor)
        experiment = experiment.changed(unserved=count_unserved(experiment, pilots[0], executor))
    if not experiment.auto_rates:
        return experiment
    rates = choose_rates(experiment, pilots[0])
    runs = len(experiment.configs) * (experiment.replications + experiment.intervals) * len(rates)
    if runs > MAX_RUNS:
        raise BadInput(f"rates: auto: expected at most {MAX_RUNS} runs, got {runs}; list fewer rates")
    return experiment.changed(rates=rates, auto_rates=False)


def run_pilots(experiment: Experiment, executor: Executor) -> list[Record]:
    """Run every configuration that starts with all requests at once; without constraints, only the baseline."""
    configs = range(len(experiment.configs) if experiment.subject_to else 1 if experiment.auto_rates else 0)
    tasks = [Task(config, 0, experiment.configs[config], rate_factor=OVERLOAD) for config in configs]
    records = run_tasks(experiment, tasks, executor)
    started = [record for record in records if "refused" not in record]
    if records and not started:
        raise BadInput(f"{experiment.name}: {', '.join(find_invalid(records).values())}")
    return started


def run_tasks(experiment: Experiment, tasks: Sequence[Task], executor: Executor) -> list[Record]:
    """Return the records of pilot runs, in the order of the tasks."""
    return run_all(executor, experiment.changed(steady_window=None).context, tasks)


def needed_length(experiment: Experiment, pilots: Sequence[Record]) -> int:
    """Return how many times as many requests as in the scenarios the runs need."""
    replications, length = experiment.runs_per_config, experiment.length
    for metrics, breakdown in ((run["metrics"], run["time_breakdown"]) for run in pilots if "metrics" in run):
        requests = metrics["completed"] + metrics["failed"]
        seconds = sum(breakdown.values()) - breakdown["queued"] - breakdown["front_end"]
        running = metrics["request_throughput"] * seconds
        needed = max(MIN_REQUESTS / replications, MIN_TURNOVER * running)
        longest = max(1, int(MAX_REQUESTS * experiment.length / requests))
        length = max(length, min(longest, math.ceil(experiment.length * needed / requests)))
    return length


def count_unserved(experiment: Experiment, pilot: Record, executor: Executor) -> float:
    """Return how many requests the configuration of a pilot leaves unserved at a light load, such as too long ones.

    If it serves all requests at once, it is 0.
    """
    metrics = pilot.get("metrics", {})
    if not metrics.get("failed") or not metrics["request_throughput"]:
        return 0.0
    count, config = experiment.runs_per_config, pilot["config"]
    factor = LIGHT_LOAD * metrics["request_throughput"] / experiment.own_rate(config)
    tasks = [Task(config, replication, experiment.configs[config], rate_factor=factor) for replication in range(count)]
    failed = [run["metrics"]["failed"] for run in run_tasks(experiment, tasks, executor) if "metrics" in run]
    return math.fsum(failed) / len(failed) if failed else 0.0


def choose_rates(experiment: Experiment, pilot: Record) -> list[float]:
    """Return rates around the highest throughput of the baseline, which is that of a run at overload."""
    if "error" in pilot:  # other rates would fail too
        raise BadInput(f"{experiment.name}: {pilot['error']}")
    throughput = pilot.get("metrics", {}).get("request_throughput", 0.0)
    problem = pilot.get("stuck") or ("" if throughput else "it serves no request")
    if problem:
        raise BadInput(f"rates: auto: the baseline cannot run at overload: {problem}; list the rates")
    rates = [min(MAX_RATE, max(MIN_RATE, round_rate(factor * throughput, 2))) for factor in AUTO_RATES]
    return sorted(set(rates))

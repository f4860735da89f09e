"""Speed of a sweep over 1,000 configurations of the contest workload: python benchmarks/sweep_speed.py

Prints the seconds, the runs per second, the CPU time per run, the speed-up of --jobs processes over one process on the
same runs, and the part of a run's CPU time that the engine takes. Machines differ, so CPU times are also printed for a
machine that runs 0.7 M bare SimPy timeouts per second.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from servesim.report.sweep_page import write_report
from servesim.runs.build import build_simulation, copy_requests
from servesim.study.executor import Executor, Serial, process_pool
from servesim.study.experiment import Experiment
from servesim.study.ranking import Summary
from servesim.study.single_run import Task, run_context
from servesim.study.study_keys import SweepFile
from servesim.study.sweep import sweep
from servesim.study.sweep_file import build_experiment
from servesim.study.table import write_summary
from servesim.traces.trace import gc_disabled
from speed import simpy_timeout_rate

BASE = {
    "workload": {"contest": {"X": 5, "T": 300}},
    "policy": {"name": "llm-serving", "decode_batch": 16},
    "profile": "ascend910b4-llama2-7b",
    "engine": {
        "num_blocks": 200, "block_size": 16, "max_model_len": 4096, "prefill_buckets": [520],
        "front_end": {"lag": 7, "end_lag": True},
    },
}  # fmt: skip
PARAMS = {
    "policy.decode_batch": [8, 16, 24, 32, 48, 64],
    "policy.prefill_batch": [1, 2, 4, 8],
    "policy.delay_variant": ["queue"],
    "policy.delay_factor": [0, 0.5, 1],
    "policy.order": ["arrival", "longest-output", "shortest-output"],
    "policy.preempted_to": ["front", "swapped"],
    "policy.victim": ["shortest", "newest", "oldest"],
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sample", type=int, default=60, help="runs for the speed-up measurement (default 60)")
    parser.add_argument("--times", type=int, default=7, help="repeats of the speed-up measurement (default 7)")
    args = parser.parse_args()
    file = SweepFile.model_validate({"params": PARAMS, "samples": args.configs - 1, "objectives": ["makespan"]})
    experiment = build_experiment(file, BASE, "speed")
    with tempfile.TemporaryDirectory() as folder:
        time_sweep(experiment, Path(folder), args.jobs)
    measure_scaling(experiment, args.sample, args.jobs, args.times)


def time_sweep(experiment: Experiment, folder: Path, jobs: int) -> None:
    """Time a whole sweep, from the start of its processes to the written report."""
    pool, rate_before = process_pool(jobs), simpy_timeout_rate()
    start, before = time.perf_counter(), os.times()
    records = sweep(experiment, folder, pool)
    pool.close()
    run_seconds = time.perf_counter() - start
    summary = Summary(experiment, records)
    write_summary(summary, folder)
    write_report(summary, folder / "report.html")
    wall, after = time.perf_counter() - start, os.times()
    cpu = sum(after[:4]) - sum(before[:4])
    rate = len(records) / run_seconds
    print(f"{len(records)} runs of 1,500 requests on {jobs} processes: {wall:.1f} s ({rate:.1f} runs/s)")
    report = wall - run_seconds
    print(f"  CPU time {cpu:.1f} s; summary and report {report:.1f} s; load average {os.getloadavg()[0]:.1f}")
    per_run, speed = 1e3 * cpu / len(records), (rate_before + simpy_timeout_rate()) / 2
    print(f"  {per_run:.1f} ms of CPU time per run; bare SimPy: {speed / 1e6:.2f} M timeouts/s; at 0.7 M timeouts/s: "
          f"{at_reference(per_run, speed):.1f} ms per run, {at_reference(wall, speed):.1f} s in total")  # fmt: skip
    parent = after.user + after.system - before.user - before.system
    print(f"  CPU time of the parent process: {parent:.1f} s ({100 * parent / cpu:.1f} %)")


def at_reference(value: float, rate: float) -> float:
    """Return a time as on a machine with 0.7 M bare SimPy timeouts per second."""
    return value * rate / 0.7e6


def measure_scaling(experiment: Experiment, count: int, jobs: int, times: int) -> None:
    """Time the same runs on one warm worker and on several, alternating; print the speed-up and the overhead."""
    step = max(1, len(experiment.configs) // count)
    tasks = [experiment.task(config, 0) for config in range(0, len(experiment.configs), step)][:count]
    print_parts(experiment.context, tasks)
    pools = [(process_pool(n), n) for n in (1, jobs)]
    for pool, workers in pools:
        list(pool.run(experiment.context, tasks[: 2 * workers]))
    (one, _), (many, _) = pools
    context = experiment.context
    pairs = sorted((time_pool(one, context, tasks), time_pool(many, context, tasks)) for _ in range(times))
    for pool, _ in pools:
        pool.close()
    speedups = sorted(one / several for one, several in pairs)
    one, several = (sorted(column)[times // 2] for column in zip(*pairs))
    print(f"{len(tasks)} runs, {times} repeats: {one:.2f} s on 1 process, {several:.2f} s on {jobs} (medians): "
          f"speed-up {speedups[times // 2]:.2f}, from {speedups[0]:.2f} to {speedups[-1]:.2f}")  # fmt: skip


def print_parts(setup: str, tasks: Sequence[Task]) -> None:
    """Print the CPU time of a run in a warm worker, and of its engine loop alone."""
    context, total, engine = run_context(setup), 0.0, 0.0
    list(Serial().run(setup, tasks[:2]))
    rate = simpy_timeout_rate()
    for task in tasks:
        start = time.process_time()
        json.dumps(context.run(task))
        total += time.process_time() - start
        scenario = context.scenario(task)
        requests, profile = copy_requests(context.trace(scenario, task).requests), context.profile(scenario)
        loop, _ = build_simulation(scenario, requests, (), True, profile)
        with gc_disabled():
            start = time.process_time()
            loop.run()
            engine += time.process_time() - start
    rate = (rate + simpy_timeout_rate()) / 2
    run_ms, engine_ms = (at_reference(1e3 * seconds / len(tasks), rate) for seconds in (total, engine))
    print(f"a run in a warm worker at 0.7 M timeouts/s: {run_ms:.1f} ms of CPU time, {engine_ms:.1f} ms in the engine: "
          f"factor {run_ms / engine_ms:.2f}, {run_ms - engine_ms:.1f} ms outside")  # fmt: skip


def time_pool(pool: Executor, setup: str, tasks: Sequence[Task]) -> float:
    """Return the wall-clock seconds of the tasks on a warm pool."""
    start = time.perf_counter()
    list(pool.run(setup, tasks))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

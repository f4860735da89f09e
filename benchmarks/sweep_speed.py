"""How fast a sweep is: 1,000 configurations of the contest's workload, how two processes scale, what the sweep adds.

Run: python benchmarks/sweep_speed.py [--configs 1000] [--jobs 2]. Prints seconds, runs a second, the speed-up of so
many processes over one on the same runs, and the part of the processes' time that was not spent in simulations.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from servesim.report.page import write_report
from servesim.runs.simulate import simulate
from servesim.study.executor import Executor, Serial, processes
from servesim.study.experiment import Experiment, SweepFile, experiment_of
from servesim.study.files import write_summary
from servesim.study.ranking import Summary
from servesim.study.single_run import Task, bench
from servesim.study.sweep import sweep

BASE = {
    "workload": {"contest": {"X": 5, "T": 300}},
    "policy": {"name": "llm-serving", "decode_batch": 16},
    "profile": "ascend910b4-llama2-7b",
    "engine": {
        "num_blocks": 200, "block_size": 16, "max_model_len": 4096, "prefill_gears": [520],
        "front_end": {"lag": 7, "end_lag": True},
    },
}  # fmt: skip
PARAMS = {
    "policy.decode_batch": [8, 16, 24, 32, 48, 64],
    "policy.prefill_batch": [1, 2, 4, 8],
    "policy.delay_variant": ["queue"],
    "policy.delay_factor": [0, 0.5, 1],
    "policy.order": ["arrival", "longest-output", "shortest-output"],
    "policy.evicted": ["front", "swapped"],
    "policy.victim": ["shortest", "newest", "oldest"],
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--configs", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sample", type=int, default=60, help="runs that are timed on one and on several processes")
    parser.add_argument("--times", type=int, default=7, help="how often: a machine's two cores are rarely both free")
    args = parser.parse_args()
    file = SweepFile.model_validate({"params": PARAMS, "samples": args.configs - 1, "objectives": ["makespan"]})
    experiment = experiment_of(file, BASE, "speed")
    with tempfile.TemporaryDirectory() as folder:
        whole(experiment, Path(folder), args.jobs)
    scaling(experiment, args.sample, args.jobs, args.times)


def whole(experiment: Experiment, folder: Path, jobs: int) -> None:
    """Time a whole sweep, from the start of its processes to its files."""
    pool = processes(jobs)
    start, before = time.perf_counter(), os.times()
    found = sweep(experiment, folder, pool)
    pool.close()
    ran = time.perf_counter() - start
    summary = Summary(experiment, found)
    write_summary(summary, folder)
    write_report(summary, folder / "report.html")
    wall, after = time.perf_counter() - start, os.times()
    cpu = sum(after[:4]) - sum(before[:4])
    print(f"{len(found)} runs of 1,500 requests on {jobs} processes: {wall:.1f} s ({len(found) / ran:.1f} runs/s)")
    print(f"  processor time {cpu:.1f} s; summary and report {wall - ran:.1f} s; load average {os.getloadavg()[0]:.1f}")
    parent = after.user + after.system - before.user - before.system
    print(f"  of it in the sweep's own process: {parent:.1f} s ({100 * parent / cpu:.1f} %)")


def scaling(experiment: Experiment, count: int, jobs: int, times: int) -> None:
    """Time the same runs on one worker and on several, warm and in turn; and what a worker does beside simulating."""
    step = max(1, len(experiment.configs) // count)
    tasks = [experiment.task(config, 0) for config in range(0, len(experiment.configs), step)][:count]
    alone, beside = overhead(experiment.setup, tasks)
    pools = [(processes(n), n) for n in (1, jobs)]
    for pool, workers in pools:
        list(pool.run(experiment.setup, tasks[: 2 * workers]))
    pairs = sorted((timed(pools[0][0], experiment.setup, tasks), timed(pools[1][0], experiment.setup, tasks))
                   for _ in range(times))  # fmt: skip
    for pool, _ in pools:
        pool.close()
    ups = sorted(one / several for one, several in pairs)
    one, several = (sorted(side)[times // 2] for side in zip(*pairs))
    print(f"{len(tasks)} runs, {times} times in turn: {one:.2f} s on 1 process, {several:.2f} s on {jobs} (medians): "
          f"speed-up {ups[times // 2]:.2f}, from {ups[0]:.2f} to {ups[-1]:.2f}")  # fmt: skip
    print(f"  {alone:.2f} s of processor time in simulations, {beside:.2f} s beside: {100 * beside / alone:.1f} %")


def overhead(setup: str, tasks: Sequence[Task]) -> tuple[float, float]:
    """Return the processor seconds of the simulations alone, and of all else that makes records of them."""
    here, simulations = bench(setup), 0.0
    list(Serial().run(setup, tasks[:2]))
    begun = time.process_time()
    for task in tasks:
        scenario = here.scenario(task)
        trace, profile = here.trace(scenario, task), here.profile(scenario)
        start = time.process_time()
        run = simulate(scenario, trace, profile=profile)
        simulations += time.process_time() - start
        json.dumps(here.figures(run))
    return simulations, time.process_time() - begun - simulations


def timed(pool: Executor, setup: str, tasks: Sequence[Task]) -> float:
    """Return the seconds a warm pool takes."""
    start = time.perf_counter()
    list(pool.run(setup, tasks))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

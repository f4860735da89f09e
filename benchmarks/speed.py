"""Speed of the simulator: CPU seconds on one core for the 10,000-request file, compared with a bare SimPy loop.

    python benchmarks/speed.py [--policies] [--million] [--trace FILE]

Times include per-request results and exclude the import. Machines differ, so every time is also printed as the number
of bare SimPy timeouts that run in the same time, measured in the same process.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import simpy
from servesim.config.scenario import scenario_from
from servesim.core import Request
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost
from servesim.policies import POLICIES
from servesim.runs.metrics import Metrics, row
from servesim.runs.simulate import Run, gc_disabled, simulate
from servesim.traces.read.load import load
from servesim.traces.trace import Trace

TRACE = Path(__file__).resolve().parents[2] / "shared" / "data" / "bench" / "workload_10k.csv.gz"
COST = LinearCost(prefill=0.005, prefill_token=6e-5, decode_step=0.015, decode_row=5e-5, context=1.2e-7)
VIDUR_SECONDS = 20.5  # CPU seconds for the same file on a core with VIDUR_RATE
VIDUR_RATE = 0.73e6  # bare SimPy timeouts/s
BATCH = {"decode_batch": 128, "max_num_seqs": 128, "max_batch_size": 128, "max_bs": 128, "running_max_req_size": 128,
         "max_ragged_sequence_count": 128, "max_running_requests": 128, "batch_cap": 128}  # fmt: skip


def simpy_timeout_rate() -> float:
    """Return the timeouts per second of a bare SimPy loop."""

    def loop(env: simpy.Environment, count: int) -> Any:
        for _ in range(count):
            yield env.timeout(1.0)

    env = simpy.Environment()
    env.process(loop(env, 200_000))
    start = time.process_time()
    env.run()
    return 200_000 / (time.process_time() - start)


def time_run(trace: Trace, name: str, **fields: Any) -> tuple[float, Run]:
    """Return the CPU seconds of one run with its per-request results."""
    settings = {key: value for key, value in BATCH.items() if key in POLICIES[name].__dataclass_fields__}
    block = {"num_blocks": 118784, "block_size": 1} if name == "lightllm" else {"num_blocks": 7424, "block_size": 16}
    if "max_total_token_num" in POLICIES[name].__dataclass_fields__:
        settings["max_total_token_num"] = 118784
    scenario = scenario_from(
        {"policy": {"name": name, **settings, **fields}, "engine": {**block, "max_model_len": 4096}}
    )
    profile = Profile("bench", COST)
    with gc_disabled():
        start = time.process_time()
        run = simulate(scenario, trace, profile=profile)
        rows = [row(request) for request in run.requests]
        seconds = time.process_time() - start
    assert len(rows) == len(trace.requests)
    return seconds, run


def median_run(trace: Trace, name: str, repeats: int = 5, **fields: Any) -> tuple[float, float, Run]:
    """Return the time of the median run, the rate of the bare loop at that time, and the run.

    The loop is timed directly before and after each run, so that both have the same machine speed.
    """
    times = []
    before = simpy_timeout_rate()
    for _ in range(repeats):
        seconds, run = time_run(trace, name, **fields)
        after = simpy_timeout_rate()
        times.append((seconds * (before + after) / 2, seconds, (before + after) / 2))
        before = after
    _, seconds, rate = sorted(times)[len(times) // 2]
    return seconds, rate, run


def print_row(label: str, seconds: float, rate: float, run: Run) -> None:
    """Print one row of the table."""
    at_reference = seconds * rate / 0.7e6
    print(
        f"{label:<28} {seconds:7.3f} s  {run.calls:>8} steps  {seconds * rate / 1e3:7.0f} k bare timeouts"
        f"  = {at_reference:.2f} s at 0.7 M/s"
    )


def time_million_requests() -> None:
    """Simulate up to a million requests; print time and peak memory for three sizes."""
    for count, output in ((100_000, 64), (1_000_000, 64), (100_000, 640)):
        random = np.random.default_rng(0)
        arrivals = np.cumsum(random.exponential(1 / (8.0 * 64 / output), count))
        requests = [Request(i, float(a), 64, output) for i, a in enumerate(arrivals)]
        seconds, run = time_run(Trace(requests, "synthetic", "ours", {}), "llm-serving", prefill_batch=8)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{count:>9,} requests of {output} tokens: {seconds:6.1f} s, {seconds / count * 1e6:5.1f} us/request, "
              f"{run.calls:,} steps, peak memory {peak:.2f} GiB")  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default=TRACE, help="trace file to simulate")
    parser.add_argument("--policies", action="store_true", help="also time every policy")
    parser.add_argument("--million", action="store_true", help="also simulate a million requests")
    args = parser.parse_args()
    if not Path(args.trace).is_file():
        parser.error(f"{args.trace}: no such file; name the 10,000-request trace with --trace")
    trace = load(args.trace)
    seconds, rate, run = median_run(trace, "llm-serving", repeats=31)  # CPU clocks vary, so a few runs are not enough
    print(f"bare SimPy: {rate / 1e6:.2f} M timeouts/s; {len(trace.requests)} requests from {Path(args.trace).name}")
    print_row("llm-serving, batch 128", seconds, rate, run)
    ratio = VIDUR_SECONDS * VIDUR_RATE / (seconds * rate)
    print(
        f"{'Vidur (published, its core)':<28} {VIDUR_SECONDS:7.1f} s  at 0.73 M timeouts/s: {ratio:.0f} times our time"
    )
    assert isinstance(run.measures, Metrics)
    if args.policies:
        for name in POLICIES:
            print_row(name, *median_run(trace, name, repeats=3))
    if args.million:
        time_million_requests()


if __name__ == "__main__":
    main()

"""How fast the simulator is: CPU seconds on one core for the 10,000-request file, beside a bare SimPy loop.

    python benchmarks/speed.py [--policies] [--million] [--trace FILE]

Import is not counted, per-request results are. Machines differ, so every figure is given as a ratio too: how many
bare SimPy timeouts could have run in the time, measured in the same process.
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
from servesim.runs.metrics import Measures, row
from servesim.runs.simulate import Run, no_collection, simulate
from servesim.traces.read.load import load
from servesim.traces.trace import Trace

TRACE = Path(__file__).resolve().parents[2] / "shared" / "data" / "bench" / "workload_10k.csv.gz"
COST = LinearCost(prefill=0.005, prefill_token=6e-5, decode_step=0.015, decode_row=5e-5, context=1.2e-7)
VIDUR = 20.5  # CPU seconds for the same file on a core with 0.73 M timeouts/s
VIDUR_TIMEOUTS = 0.73e6
BATCH = {"decode_batch": 128, "max_num_seqs": 128, "max_batch_size": 128, "max_bs": 128, "running_max_req_size": 128,
         "max_ragged_sequence_count": 128, "max_running_requests": 128, "batch_cap": 128}  # fmt: skip


def bare_rate() -> float:
    """Return how many timeouts a second a bare SimPy loop manages here and now."""

    def loop(env: simpy.Environment, count: int) -> Any:
        for _ in range(count):
            yield env.timeout(1.0)

    env = simpy.Environment()
    env.process(loop(env, 200_000))
    start = time.process_time()
    env.run()
    return 200_000 / (time.process_time() - start)


def timed(trace: Trace, name: str, **fields: Any) -> tuple[float, Run]:
    """Return the CPU seconds of one run, results included."""
    known = {key: value for key, value in BATCH.items() if key in POLICIES[name].__dataclass_fields__}
    block = {"num_blocks": 118784, "block_size": 1} if name == "lightllm" else {"num_blocks": 7424, "block_size": 16}
    if "max_total_token_num" in POLICIES[name].__dataclass_fields__:
        known["max_total_token_num"] = 118784
    scenario = scenario_from({"policy": {"name": name, **known, **fields}, "engine": {**block, "max_model_len": 4096}})
    profile = Profile("bench", COST)
    with no_collection():
        start = time.process_time()
        run = simulate(scenario, trace, profile=profile)
        rows = [row(request) for request in run.requests]
        seconds = time.process_time() - start
    assert len(rows) == len(trace.requests)
    return seconds, run


def best(trace: Trace, name: str, tries: int = 5, **fields: Any) -> tuple[float, float, Run]:
    """Return the time, and the bare loop's rate around it, of the median of a few runs.

    The loop is timed right before and after each run, so that both saw the same machine.
    """
    found = []
    before = bare_rate()
    for _ in range(tries):
        seconds, run = timed(trace, name, **fields)
        after = bare_rate()
        found.append((seconds * (before + after) / 2, seconds, (before + after) / 2))
        before = after
    _, seconds, rate = sorted(found)[len(found) // 2]
    return seconds, rate, run


def show(label: str, seconds: float, rate: float, run: Run) -> None:
    """Print one line of the table."""
    at_reference = seconds * rate / 0.7e6
    print(
        f"{label:<28} {seconds:7.3f} s  {run.calls:>8} steps  {seconds * rate / 1e3:7.0f} k bare timeouts"
        f"  = {at_reference:.2f} s at 0.7 M/s"
    )


def million() -> None:
    """Run a million requests; print time for two sizes and the memory taken."""
    for count, output in ((100_000, 64), (1_000_000, 64), (100_000, 640)):
        chance = np.random.default_rng(0)
        arrivals = np.cumsum(chance.exponential(1 / (8.0 * 64 / output), count))
        requests = [Request(i, float(a), 64, output) for i, a in enumerate(arrivals)]
        seconds, run = timed(Trace(requests, "synthetic", "ours", {}), "llm-serving", prefill_batch=8)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{count:>9,} requests of {output} tokens: {seconds:6.1f} s, {seconds / count * 1e6:5.1f} us each, "
              f"{run.calls:,} steps, peak memory {peak:.2f} GiB")  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default=TRACE, help="the file to run")
    parser.add_argument("--policies", action="store_true", help="time every policy family")
    parser.add_argument("--million", action="store_true", help="run a million requests")
    args = parser.parse_args()
    if not Path(args.trace).is_file():
        parser.error(f"{args.trace}: no such file; give the 10,000-request workload with --trace")
    trace = load(args.trace)
    seconds, rate, run = best(trace, "llm-serving", tries=31)  # clocks move: a few runs would say little
    print(f"bare SimPy: {rate / 1e6:.2f} M timeouts/s; {len(trace.requests)} requests from {Path(args.trace).name}")
    show("llm-serving, batch 128", seconds, rate, run)
    ratio = VIDUR * VIDUR_TIMEOUTS / (seconds * rate)
    print(f"{'Vidur (published, its core)':<28} {VIDUR:7.1f} s  at 0.73 M timeouts/s: {ratio:.0f} times as long")
    assert isinstance(run.measures, Measures)
    if args.policies:
        for name in POLICIES:
            show(name, *best(trace, name, tries=3))
    if args.million:
        million()


if __name__ == "__main__":
    main()

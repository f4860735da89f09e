"""What users run: the rows of `python benchmarks/speed.py --only users`.

A row has a label, a function that prepares what is timed, and a target in seconds at 0.7 M bare SimPy timeouts/s. The
target of a row with `base` is a multiple of the time of that row. Runs are whole calls of `servesim.run`.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import servesim
from servesim.config.scenario import scenario_from
from servesim.runs.run_folder import write_run
from servesim.runs.simulate import simulate
from servesim.study.executor import open_executor
from servesim.study.sweep import sweep
from servesim.study.sweep_file import read_experiment
from sweep_speed import sweep_keys
from timing import LOOP, Timing, judge, median_timing, print_row, run_sim, target, time_call

COST = {"prefill": 0.005, "prefill_token": 6e-5, "decode_step": 0.015, "decode_row": 5e-5, "context": 1.2e-7}
BLOCKS = {"num_blocks": 7424, "block_size": 16, "max_model_len": 4096}
LENGTHS = {"kind": "lognormal", "prompt": {"mean": 300, "sd": 300}, "output": {"mean": 150, "sd": 100}}
KNOWN = {"model": "llama-3.1-8b", "device": "H100"}
GROUPS = {"model": "gpt-oss-20b", "device": "H100"}  # KV cache groups
VLLM = {"name": "vllm-v1", "max_num_seqs": 128}
SGLANG = {"name": "sglang", "max_running_requests": 128}
LLM_SERVING = {"name": "llm-serving", "decode_batch": 128}
EAGLE = {"method": "eagle", "tokens": 3, "acceptance": 0.7}
PER_REPLICA = 40  # requests of a fleet
RUN_REQUESTS = 50  # of each configuration of a sweep; the time of a report does not depend on it
BUDGET, MOST = 4.0, 7  # CPU seconds and repeats after which a row is not repeated

Measure = Callable[[], Timing]  # one measurement


class Size(NamedTuple):
    """How much work the rows have."""

    requests: Optional[int]  # of a run; None: those of the trace
    written: int
    fleets: tuple[int, ...]
    aware_fleets: tuple[int, ...]
    sweeps: tuple[int, ...]
    loop: int  # timeouts of the bare SimPy loop


FULL = Size(None, 100_000, (16, 64, 256, 1024), (16, 64, 256), (1_000, 5_000), LOOP)
QUICK = Size(20, 20, (2, 3), (2, 3), (3,), 2_000)


class Row(NamedTuple):
    """One row of the table."""

    label: str
    prepare: Callable[[], Measure]
    target: float
    base: str = ""  # label of the row that the target is a multiple of


class Result(NamedTuple):
    """A measured row."""

    label: str
    timing: Timing
    target: float
    ratio: Optional[float] = None  # to the base of the row


def rows(trace: str, size: Size, folder: Path) -> Iterator[Row]:
    """Return all rows; `folder` is for files that they write."""
    requests = {"trace": trace} if size.requests is None else {"workload": workload(size.requests, 8.0)}
    run = partial(partial, measure_run, size.loop, **requests)
    yield Row("vllm-v1, linear costs", run(policy=VLLM, profile=COST, engine=BLOCKS), 0.20)
    yield Row("vllm-v1, h200-llama2-7b", run(policy=VLLM, profile="h200-llama2-7b"), 0.30)
    yield Row("vllm-v1, llama-3.1-8b on H100", run(policy=VLLM, profile=KNOWN), 0.25)
    yield Row("the same, eagle, 3 drafts", run(policy=VLLM, profile=KNOWN, speculative=EAGLE), 0.35)
    yield Row("vllm-v1, gpt-oss-20b on H100", run(policy=VLLM, profile=GROUPS), 0.5)
    yield Row("sglang, llama-3.1-8b on H100", run(policy=SGLANG, profile=KNOWN), 0.3)
    yield Row("llm-serving, ascend910b4-llama2-7b", run(policy=LLM_SERVING, profile="ascend910b4-llama2-7b"), 0.3)
    yield Row(f"writing the files of {size.written:,} requests", partial(measure_writing, size, folder), 0.8)
    yield from fleet_rows("least-requests", VLLM, size.fleets, 1.3, size.loop)
    yield from fleet_rows("sglang-cache-aware", SGLANG, size.aware_fleets, 1.5, size.loop)
    for configs in size.sweeps:
        label = f"report of {configs:,} configurations"
        yield Row(label, partial(measure_report, configs, size, folder), 3e-3 * configs)


def workload(requests: int, rate: float) -> dict[str, Any]:
    """Return random requests with Poisson arrivals."""
    return {"requests": requests, "arrivals": {"kind": "poisson", "rate": rate}, "lengths": LENGTHS}


def measure_run(loop: int, requests: float = 0, **sections: Any) -> Measure:
    """Measure a call of `servesim.run`; of a run with a number of requests, the time of 10,000 of them."""

    def measure() -> Timing:
        timing = time_call(lambda: int(servesim.run(**sections).metrics["model_calls"]), loop)
        share = 10_000 / requests if requests else 1
        return timing._replace(seconds=timing.seconds * share, steps=round(timing.steps * share))

    return measure


def fleet_rows(router: str, policy: dict[str, Any], sizes: tuple[int, ...], limit: float, loop: int) -> Iterator[Row]:
    """Return a row per size of a fleet: the time of 10,000 requests. The load of a replica is the same in all."""
    for replicas in sizes:
        sections = {"policy": policy, "profile": "h200-llama2-7b", "cluster": {"replicas": replicas, "router": router}}
        requests = PER_REPLICA * replicas
        run = partial(measure_run, loop, requests, workload=workload(requests, 4.0 * replicas), **sections)
        base = "" if replicas == sizes[0] else f"{router}, {sizes[0]} replicas"
        yield Row(f"{router}, {replicas:,} replicas", run, limit if base else math.inf, base)


def measure_writing(size: Size, folder: Path) -> Measure:
    """Measure what `sim run -o` does after the simulation; nearly all of it is requests.csv."""
    scenario = scenario_from({"policy": VLLM, "profile": COST, "engine": BLOCKS, "workload": workload(size.written, 6)})
    run = simulate(scenario)

    def write() -> int:
        write_run(run, folder / "run")
        return 0

    return partial(time_call, write, size.loop)


def measure_report(configs: int, size: Size, folder: Path) -> Measure:
    """Measure `sim report`, the whole process, on a sweep of many configurations."""
    out = folder / f"sweep-{configs}"
    with open_executor("local", None, configs) as executor:
        sweep(read_experiment(sweep_keys(configs, size.requests or RUN_REQUESTS)), out, executor)
    return lambda: run_sim(["report", str(out)], loop=size.loop).timing


def measure_row(measure: Measure, quick: bool) -> Timing:
    """Return the median timing. The first one, which also loads modules and files, counts only if there is no other."""
    timings = [measure()]
    while not quick and len(timings) <= MOST and sum(timing.seconds for timing in timings) < BUDGET:
        timings.append(measure())
    return median_timing(timings[1:] or timings)


def measure_users(trace: str, quick: bool) -> Iterator[Result]:
    """Measure every row."""
    size, timeouts = QUICK if quick else FULL, {}
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(trace, size, Path(folder)):
            timing = measure_row(row.prepare(), quick)
            timeouts[row.label] = timing.timeouts
            ratio = timing.timeouts / timeouts[row.base] if row.base else None
            yield Result(row.label, timing, math.inf if quick else target(row.target), ratio)


def time_users(trace: str, quick: bool, as_json: bool) -> None:
    """Print every row, or a line of JSON for it."""
    for result in measure_users(trace, quick):
        if as_json:
            print(json.dumps(result), flush=True)
            continue
        print_row(result.label, result.timing, math.inf if result.ratio else result.target)
        if result.ratio:
            print(
                f"{'':<34} {result.ratio:7.2f} times the smallest fleet{judge(result.ratio, result.target, ' times')}"
            )

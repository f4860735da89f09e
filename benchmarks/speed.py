"""Speed of the simulator: CPU seconds on one core for the 10,000-request file, compared with a bare SimPy loop.

    python benchmarks/speed.py [--only PART | --policies] [--million] [--trace FILE] [--quick]

Times include per-request results and exclude the import. Machines differ, so every time is also printed as the number
of bare SimPy timeouts that run in the same time, measured in the same process, and as the seconds on a machine with
0.7 M timeouts per second. Targets are for that machine and for a compiled installation.

Users: what they run, in whole calls and commands (speed_users.py). The other parts time the engine alone.

Policies: those that people choose between must take at most 1.3 times the time that vllm-v1 took when it decided every
step after the last one had returned (V1_SECONDS). Settings that change the engine have rows of their own.

Ten times the tokens: the same requests with outputs ten times as long. Arrival times, KV blocks and max_model_len are
also multiplied by ten, so that the load is the same. Without more blocks, most requests would be preempted many times.

Prefix cache: the same file shares no text, so the ratio is the price of the cache. Mooncake's trace shares long texts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Optional

from servesim.config.scenario import Scenario, scenario_from
from servesim.config.user_code import allow_code
from servesim.core import ClientRequest
from servesim.costs.device_profile import load_profile
from servesim.policies import POLICIES
from servesim.runs.request_rows import request_rows
from servesim.runs.simulate import load_trace, simulate
from servesim.traces.read.formats import load
from servesim.traces.trace import RequestTable, Trace, gc_disabled, table_of
from servesim.version import is_compiled
from speed_users import COST, time_users
from timing import Timing, judge, median_timing, print_row, run_sim, simpy_timeout_rate, target

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / "shared" / "data"
TRACE = DATA / "bench" / "workload_10k.csv.gz"
MOONCAKE = DATA / "traces" / "mooncake_conversation.csv.gz"
VIDUR_SECONDS = 20.5  # CPU seconds for the same file on a core with VIDUR_RATE
VIDUR_RATE = 0.73e6  # bare SimPy timeouts/s
BATCH = {"decode_batch": 128, "max_num_seqs": 128, "max_batch_size": 128, "max_bs": 128, "running_max_req_size": 128,
         "max_ragged_sequence_count": 128, "max_running_requests": 128, "batch_cap": 128,
         "max_total_token_num": 118784}  # fmt: skip
USER_POLICY = {"name": f"{ROOT / 'examples' / 'my_policy.py'}:Gather", "batch": 128}
# Targets in seconds at timing.REFERENCE_RATE.
TARGET, PLAIN_TARGET, USER_TARGET, MILLION_TARGET = 0.12, 0.45, 0.20, 16.0
V1_SECONDS = 0.117  # vllm-v1 without asynchronous scheduling, in version 0.2.0 before it could do so
POLICY_TARGET = 1.3 * V1_SECONDS
POLICY_VARIANTS: dict[str, dict[str, Any]] = {
    "vllm-v1, synchronous": {"name": "vllm-v1", "async_scheduling": False},
    "sglang, no radix cache": {"name": "sglang", "disable_radix_cache": True},
    "sglang, no overlap": {"name": "sglang", "disable_overlap_schedule": True},
    "sglang, neither of them": {"name": "sglang", "disable_radix_cache": True, "disable_overlap_schedule": True},
    "mindie, throughput": {"name": "mindie", "stage_policy": "throughput"},
    "mindie, latency": {"name": "mindie", "stage_policy": "latency"},
    "mindie, dynamic batch size": {"name": "mindie", "dynamic_batch_size": True},
    "mindie, SplitFuse": {"name": "mindie", "split_fuse": True},
    "mindie, asynchronous": {"name": "mindie", "async_scheduling": True},
}
# Engines on Ascend: 1.5 times vllm-v1 as it is by default (0.12 s).
ON_ASCEND = ("vllm-ascend-batch-jobs", *(name for name in POLICY_VARIANTS if name.startswith("mindie")))
SLOW_POLICY_TARGETS = dict.fromkeys(ON_ASCEND, 0.18)
TEN_TIMES_TARGET = CACHE_TARGET = DRAFTS_TARGET = 1.3  # times the time
MOONCAKE_TARGET = 3.0
REPLICAS, FLEET_TARGET = 16, 1.2  # times the time of servers with the shares of the replicas
PARTS = ("users", "first", "plain", "policies", "policy-file", "tokens", "cache", "drafts", "fleet")
MEMORY_TARGET = 1e9  # bytes


@dataclass
class Case:
    """One row of the table: a trace and a policy."""

    label: str
    trace: Trace
    policy: dict[str, Any]
    repeats: int = 3
    times: int = 1  # multiplies the blocks and max_model_len
    engine: dict[str, Any] = field(default_factory=dict)  # other settings than those of the 10,000-request file
    speculative: Optional[dict[str, Any]] = None
    profile: Any = field(default_factory=lambda: COST)
    scenario: Scenario = field(init=False)

    def __post_init__(self) -> None:
        blocks, size = (118784, 1) if self.policy["name"] == "lightllm" else (7424, 16)
        engine = {"num_blocks": blocks * self.times, "block_size": size, "max_model_len": 4096 * self.times}
        engine |= self.engine
        tree = {"policy": self.policy, "engine": engine, "profile": self.profile, "speculative": self.speculative}
        self.scenario = scenario_from(tree)

    def run(self) -> tuple[float, int]:
        """Return the CPU seconds and the steps of one run with its per-request results."""
        profile = load_profile(self.scenario.profile)
        with gc_disabled(), allow_code(trust=True):
            start = time.process_time()
            run = simulate(self.scenario, self.trace, profile=profile)
            rows = list(request_rows(run.requests))
            seconds = time.process_time() - start
        assert len(rows) == len(self.trace.requests)
        return seconds, run.calls


def time_cases(*cases: Case) -> list[list[Timing]]:
    """Return the timings of every case. The runs of several cases alternate, so that all have the same machine speed.

    The bare loop is timed directly before and after each run, for the same reason.
    """
    timings: list[list[Timing]] = [[] for _ in cases]
    before = simpy_timeout_rate()
    for _ in range(cases[0].repeats):
        for case, results in zip(cases, timings):
            seconds, steps = case.run()
            after = simpy_timeout_rate()
            results.append(Timing(seconds, (before + after) / 2, steps))
            before = after
    return timings


def policy_settings(name: str) -> dict[str, Any]:
    """Return a built-in policy with a batch of 128 requests."""
    return {"name": name, **{key: BATCH[key] for key in POLICIES[name].__dataclass_fields__ if key in BATCH}}


def scaled_trace(trace: Trace, times: int, at_once: bool) -> Trace:
    """Return the trace with longer outputs; arrivals are later by the same factor, or all at 0."""
    columns = {
        "id": range(len(trace.requests)),
        "arrival": trace.arrivals * (0.0 if at_once else times),
        "prompt": trace.prompts,
        "output": trace.outputs * times,
    }
    return Trace(RequestTable(columns), trace.source, trace.format)


def time_first(trace: Trace, as_json: bool) -> None:
    """Time the default policy, with many repeats: CPU clocks vary."""
    case = Case("llm-serving, batch 128", trace, policy_settings("llm-serving"), repeats=21)
    timing = median_timing(time_cases(case)[0])
    if as_json:
        print(json.dumps(timing))
        return
    print(f"bare SimPy: {timing.rate / 1e6:.2f} M timeouts/s; {len(trace.requests)} requests from {trace.source}; "
          f"load average {os.getloadavg()[0]:.1f}")  # fmt: skip
    print_row(case.label, timing, TARGET if is_compiled() else PLAIN_TARGET)
    ratio = VIDUR_SECONDS * VIDUR_RATE / timing.timeouts
    print(
        f"{'Vidur (published, its core)':<34} {VIDUR_SECONDS:7.1f} s  at 0.73 M timeouts/s: {ratio:.0f} times our time"
    )


def time_plain(trace_file: str, folder: str) -> None:
    """Time the default policy without compiled modules, in a child process."""
    if not is_compiled():
        print("This installation is plain Python, so no row is compiled ('make compile' compiles the engine).")
        return
    subprocess.run([sys.executable, str(ROOT / "tools" / "plain_copy.py"), folder], check=True)
    command = [sys.executable, __file__, "--trace", trace_file, "--json"]
    child = subprocess.run(command, env={**os.environ, "PYTHONPATH": folder}, check=True, stdout=subprocess.PIPE)
    print_row("llm-serving, plain Python", Timing(*json.loads(child.stdout)), PLAIN_TARGET)


def time_policies(trace: Trace) -> None:
    """Time every built-in policy, and settings that change what its engine does in a step."""
    for label, settings in {**{name: {"name": name} for name in POLICIES}, **POLICY_VARIANTS}.items():
        case = Case(label, trace, {**policy_settings(settings["name"]), **settings}, repeats=5)
        seconds = SLOW_POLICY_TARGETS.get(label, POLICY_TARGET)
        print_row(label, median_timing(time_cases(case)[0]), target(seconds))


def time_ten_times(trace: Trace) -> None:
    """Time the default policy with outputs ten times as long, and print the ratio of the times."""
    for label, at_once in (("ten times the tokens", False), ("the same, all arrive at 0", True)):
        one, ten = (
            Case(label, scaled_trace(trace, times, at_once), policy_settings("llm-serving"), repeats=7, times=times)
            for times in (1, 10)
        )
        timings = time_cases(one, ten)
        ratio = median(many.timeouts / few.timeouts for few, many in zip(*timings))
        if at_once:
            print_row("outputs x 1, all arrive at 0", median_timing(timings[0]), math.inf)
        print_row(label, median_timing(timings[1]), math.inf)
        print(f"{'':<34} {ratio:7.2f} times the time{judge(ratio, target(TEN_TIMES_TARGET), ' times')}")


def time_cache(trace: Trace) -> None:
    """Time vllm-v1 with its prefix cache: prompts that share nothing, and Mooncake's long prompts that share much."""
    off, on = (
        Case("vllm-v1", trace, {**policy_settings("vllm-v1"), "enable_prefix_caching": cache}, repeats=7)
        for cache in (False, True)
    )
    timings = time_cases(off, on)
    print_row("vllm-v1, no prefix cache", median_timing(timings[0]), math.inf)
    print_row("prefix cache, no sharing", median_timing(timings[1]), math.inf)
    ratio = median(cached.timeouts / plain.timeouts for plain, cached in zip(*timings))
    print(f"{'':<34} {ratio:7.2f} times the time{judge(ratio, target(CACHE_TARGET), ' times')}")
    if not MOONCAKE.is_file():
        print(f"Mooncake's conversation trace: skipped, {MOONCAKE} does not exist")
        return
    engine = {"num_blocks": 40_000, "max_model_len": None}
    case = Case("Mooncake conversations", load(str(MOONCAKE)), {"name": "vllm-v1", "max_num_batched_tokens": 8192},
                engine=engine)  # fmt: skip
    print_row(case.label, median_timing(time_cases(case)[0]), target(MOONCAKE_TARGET))


def time_drafts(trace: Trace) -> None:
    """Time vllm-v1 with speculative decoding: every row of a step accepts a number of drafts of its own.

    Step times of a known model depend on more numbers than the linear ones, and have no target.
    """
    known = {"model": "llama-3.1-8b", "device": "H100"}
    for label, profile, limit in (
        ("3 drafts, 70 % accepted", COST, target(DRAFTS_TARGET)), ("the same, derived times", known, math.inf)
    ):  # fmt: skip
        off, on = (
            Case("vllm-v1", trace, policy_settings("vllm-v1"), repeats=7, speculative=section, profile=profile)
            for section in (None, {"method": "eagle", "tokens": 3, "acceptance": 0.7})
        )
        timings = time_cases(off, on)
        print_row(label, median_timing(timings[1]), math.inf)
        ratio = median(drafted.timeouts / plain.timeouts for plain, drafted in zip(*timings))
        print(f"{'':<34} {ratio:7.2f} times the time{judge(ratio, limit, ' times')}")


def time_fleet() -> None:
    """Time 100,000 requests over 16 replicas, and print the ratio to the sum of 16 servers with the same shares."""
    lengths = {"kind": "lognormal", "prompt": {"mean": 300, "sd": 300}, "output": {"mean": 150, "sd": 100}}
    workload = {"requests": 100_000, "arrivals": {"kind": "poisson", "rate": 6.0 * REPLICAS}, "lengths": lengths}
    tree = {"policy": policy_settings("vllm-v1"), "profile": COST, "workload": workload,
            "engine": {"num_blocks": 7424, "block_size": 16, "max_model_len": 4096}}  # fmt: skip
    alone = scenario_from(tree)
    trace = load_trace(alone)

    def timed(scenario: Scenario, *parts: Trace) -> Timing:
        """Time one run of each part. The speed of the machine may change, so the bare loop is timed around each run."""
        timings, before = [], simpy_timeout_rate()
        for part in parts:
            start = time.process_time()
            run = simulate(scenario, part)
            seconds, after = time.process_time() - start, simpy_timeout_rate()
            timings.append(Timing(seconds, (before + after) / 2, run.calls))
            before = after
        seconds = sum(each.seconds for each in timings)
        return Timing(seconds, sum(each.timeouts for each in timings) / seconds, sum(each.steps for each in timings))

    for router in ("round-robin", "random", "least-requests", "vllm-dp"):
        fleet = scenario_from({**tree, "cluster": {"replicas": REPLICAS, "router": router}})
        shares: list[list[ClientRequest]] = [[] for _ in range(REPLICAS)]
        replicas = simulate(fleet, trace).replicas
        assert replicas is not None
        for request in trace.requests:
            shares[replicas.replica_of[request.id]].append(request)
        parts = [Trace(table_of(share), trace.source, trace.format) for share in shares]
        pairs = [(timed(fleet, trace), timed(alone, *parts)) for _ in range(5)]
        ratio, seconds = median(pair[0].timeouts / pair[1].timeouts for pair in pairs), pairs[0][0].seconds
        limit = target(FLEET_TARGET) if router in ("round-robin", "random") else math.inf
        text = f"{ratio:7.2f} times 16 shares{judge(ratio, limit, '')}"
        print(f"{f'16 replicas, {router}':<34} {seconds:7.3f} s {text}", flush=True)


def time_million(folder: str, plain: bool) -> None:
    """Run `sim run` with a million requests, without and with files; print CPU time and peak memory of the process."""
    scenario = {
        "workload": {"requests": 1_000_000, "arrivals": {"kind": "poisson", "rate": 8.0},
                     "lengths": {"prompt": 64, "output": 64}},
        "policy": {**policy_settings("llm-serving"), "prefill_batch": 8},
        "engine": {"num_blocks": 7424, "block_size": 16, "max_model_len": 4096},
        "profile": COST,
    }  # fmt: skip
    file, out = Path(folder) / "million.json", Path(folder) / "million"
    file.write_text(json.dumps(scenario), encoding="utf-8")
    command, write = [str(file), "--json"], ["-o", str(out)]
    print_process("a million requests", command, None, target(MILLION_TARGET))
    print_process("the same, files written (-o)", command + write)
    if plain:
        print_process("the same, -o, plain Python", command + write, {**os.environ, "PYTHONPATH": folder})


def print_process(
    label: str, arguments: list[str], env: Optional[dict[str, str]] = None, seconds: float = math.inf
) -> None:
    """Print the row of one `sim run` and its peak memory."""
    done = run_sim(["run", *arguments], env)
    print_row(label, done.timing._replace(steps=json.loads(done.printed)["model_calls"]), seconds)
    print(f"{'':<34} {done.memory / 1e9:7.3f} GB peak memory{judge(done.memory / 1e9, MEMORY_TARGET / 1e9, ' GB')}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default=str(TRACE), help="trace file to simulate")
    parser.add_argument("--only", metavar="PART", choices=PARTS,
                        help=f"print one part of the table: {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--policies", dest="only", action="store_const", const="policies",
                        help="the same as --only policies")  # fmt: skip
    parser.add_argument("--million", action="store_true", help="also simulate a million requests")
    parser.add_argument("--quick", action="store_true", help="only the part `users`, with a few requests")
    parser.add_argument("--json", action="store_true", help="print the rows of `users`, or else the first one, as JSON")
    args = parser.parse_args()
    if args.quick:
        time_users(args.trace, True, args.json)
        return
    if not Path(args.trace).is_file():
        parser.error(f"{args.trace}: no such file; name the 10,000-request trace with --trace")
    trace = load(args.trace)
    if args.json and args.only != "users":
        time_first(trace, True)
        return
    parts = {args.only} if args.only else set(PARTS)
    with tempfile.TemporaryDirectory() as folder:
        if "users" in parts:
            time_users(args.trace, False, args.json)
        if "first" in parts:
            time_first(trace, False)
        if "plain" in parts:
            time_plain(args.trace, folder)
        if "policies" in parts:
            time_policies(trace)
        if "policy-file" in parts:
            case = Case("user's policy, interpreted", trace, USER_POLICY, repeats=5)
            print_row(case.label, median_timing(time_cases(case)[0]), target(USER_TARGET))
        if "tokens" in parts:
            time_ten_times(trace)
        if "cache" in parts:
            time_cache(trace)
        if "drafts" in parts:
            time_drafts(trace)
        if "fleet" in parts:
            time_fleet()
        if args.million:
            time_million(folder, plain="plain" in parts and is_compiled())


if __name__ == "__main__":
    main()

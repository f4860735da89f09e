"""Routers compared: Mooncake's conversation trace over 4 and 8 replicas, and published comparisons.

    python benchmarks/routers.py [DATA] [PART...]

DATA is the folder with traces/mooncake_conversation.csv.gz and cluster/*.csv; the default is the shared data. The parts
are mooncake, thresholds, prefix, ladder and nodes; the default is all. It writes results/routers.md.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from servesim.config.scenario import scenario_from
from servesim.core import ClientRequest, Request
from servesim.core.content import Content, content_of_pieces
from servesim.costs.device_profile import load_profile
from servesim.runs.build import copy_requests
from servesim.runs.fleet import build_fleet
from servesim.runs.simulate import run_loop
from servesim.traces.read.formats import load
from servesim.traces.trace import stream

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
RESULT = Path(__file__).resolve().parent / "results" / "routers.md"
VLLM = {"policy": "vllm-v1", "trace": "requests"}
SMALL = {**VLLM, "profile": {"model": "llama-3.1-8b", "device": "H200"}}  # 8 B parameters, one H200 a replica
RATES = {4: 1.7, 8: 3.4}  # replicas -> requests per second; that of the trace is 3.4
ROUTERS: Mapping[str, Any] = {
    "round-robin": "round-robin", "random": "random", "least-requests": "least-requests",
    "power-of-two": "power-of-two", "sticky": "sticky", "vllm-dp": "vllm-dp",
    "sglang-cache-aware": "sglang-cache-aware", "production-stack": "production-stack",
    "production-stack-kvaware": "production-stack-kvaware", "llm-d": "llm-d", "llm-d-precise": "llm-d-precise",
    "dynamo-kv": "dynamo-kv", "dynamo-kv without events": {"name": "dynamo-kv", "use_kv_events": False},
    "dynamo-kv without prefixes": {"name": "dynamo-kv", "overlap_score_credit": 0.0}, "aibrix": "aibrix",
}  # fmt: skip


class Result(NamedTuple):
    """What a router achieves."""

    hit_rate: float
    ttft: float  # mean seconds
    ttft_p90: float
    tpot: float  # mean milliseconds
    most: float  # prompt tokens of the busiest replica / mean
    tokens_per_second: float  # generated


def run(
    settings: Mapping[str, Any], replicas: int, router: Any, requests: Sequence[ClientRequest], since: float = 0.0
) -> Result:
    """Simulate a fleet. Requests that arrive before `since` are a warm-up."""
    scenario = scenario_from({**settings, "cluster": {"replicas": replicas, "router": router}})
    profile, copies = load_profile(scenario.profile), copy_requests(requests)
    assert scenario.cluster is not None
    fleet, clocks = build_fleet(scenario, scenario.cluster, copies, (), True, profile)
    done = run_loop(fleet, clocks, scenario, profile, copies)
    assert done.stuck is None, done.stuck
    sent: Counter[int] = Counter()
    counted = [request for request in copies if request.sent >= since]
    for request in counted:
        sent[fleet.replica_of[request.id]] += request.prompt
    ttfts = np.array([ttft_of(request) for request in counted])
    tpots = [tpot for tpot in map(tpot_of, counted) if tpot is not None]
    seconds = max(request.finish or 0.0 for request in counted) - since
    return Result(
        done.cache_metrics.get("prefix_hit_rate", 0.0), float(ttfts.mean()), float(np.percentile(ttfts, 90)),
        1e3 * float(np.mean(tpots)) if tpots else 0.0, max(sent.values()) * replicas / sum(sent.values()),
        sum(request.output for request in counted) / seconds,
    )  # fmt: skip


def ttft_of(request: Request) -> float:
    assert request.first_token is not None
    return request.first_token - request.sent


def tpot_of(request: Request) -> Optional[float]:
    if request.output < 2 or request.last_token is None or request.first_token is None:
        return None
    return (request.last_token - request.first_token) / (request.output - 1)


def conversation(data: Path, rate: float, output: Optional[int] = None) -> list[ClientRequest]:
    """Return Mooncake's trace at a rate. It has no sessions: requests with the same second block are one."""
    trace = load(data / "traces" / "mooncake_conversation.csv.gz").requests
    own = len(trace) / (trace[-1].arrival - trace[0].arrival)
    found = []
    for request in trace:
        content: Optional[Content] = request.content
        assert content is not None
        found.append(
            ClientRequest(request.id, request.arrival * own / rate, request.prompt,
                          request.output if output is None else output,
                          session=str(content.names[min(1, len(content.names) - 1)]), content=content)
        )  # fmt: skip
    return found


def mooncake(data: Path) -> Iterable[str]:
    """Compare all routers on Mooncake's trace."""
    for replicas, rate in RATES.items():
        requests = conversation(data, rate)
        yield f"## Mooncake's conversation trace, {replicas} replicas, {rate} requests/s\n"
        yield from table(SMALL, replicas, ROUTERS, requests)


def table(settings: Mapping[str, Any], replicas: int, routers: Mapping[str, Any], requests: Any) -> Iterable[str]:
    """Return the lines of a table of routers."""
    yield "| router | hit rate | TTFT mean | TTFT p90 | TPOT mean | busiest replica |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for name, router in routers.items():
        r = run(settings, replicas, router, requests)
        yield (
            f"| {name} | {100 * r.hit_rate:.1f} % | {r.ttft:.2f} s | {r.ttft_p90:.2f} s | {r.tpot:.1f} ms "
            f"| {r.most:.2f} |"
        )
    yield ""


def thresholds(data: Path) -> Iterable[str]:
    """Show what the thresholds of SGLang's router are for: few popular prefixes."""
    from servesim.traces.make.synth import synthesise

    settings = {
        **SMALL, "workload": {
            "requests": 3000, "arrivals": {"kind": "poisson", "rate": 240},
            "lengths": {"kind": "lognormal", "prompt": {"mean": 300, "sd": 300}, "output": {"mean": 100, "sd": 80}},
            "prefixes": {"count": 20, "tokens": 2048, "zipf": 1.1},
        },
    }  # fmt: skip
    del settings["trace"]
    workload = scenario_from(settings).workload
    assert workload is not None
    requests = synthesise(workload, 0).requests
    names = {"tight (4, 1.1)": (4, 1.1), "default (64, 1.5)": (64, 1.5), "off": (10**9, 1.5)}
    routers: dict[str, Any] = {"round-robin": "round-robin"}
    for name, (absolute, relative) in names.items():
        routers[f"sglang-cache-aware, thresholds {name}"] = {
            "name": "sglang-cache-aware", "balance_abs_threshold": absolute, "balance_rel_threshold": relative,
        }  # fmt: skip
    yield "## 20 prefixes of 2,048 tokens, the first one in a third of the requests; 4 replicas, 240 requests/s\n"
    yield from table(settings, 4, routers, requests)


def prefix(data: Path) -> Iterable[str]:
    """Simulate the report that round robin beats cache_aware with one prefix for all requests."""
    times = stream(0, "arrivals").exponential(1 / 3, 400).cumsum().tolist()
    requests = [
        ClientRequest(n, time, 2548 + 7252, 430, content=content_of_pieces([("system", 2548), (("own", n), 7252)]))
        for n, time in enumerate(times)
    ]
    settings = {
        "policy": "sglang",
        "trace": "requests",
        "profile": {"model": "llama-3.1-70b", "device": "H100", "tensor_parallel": 8},
    }
    routers: dict[str, Any] = {"round-robin": "round-robin", "cache_aware, cache_threshold 0.3": "sglang-cache-aware"}
    routers["cache_aware, cache_threshold 0.25"] = {"name": "sglang-cache-aware", "cache_threshold": 0.25}
    yield "## One prefix shared by all requests, 2 replicas, 3 requests/s (published: 0.627 s and 1.617 s)\n"
    yield from table(settings, 2, routers, requests)


def ladder(data: Path) -> Iterable[str]:
    """Simulate llm-d's ladder of rates: round robin against precise prefix routing."""
    serve = {"name": "vllm-v1", "max_num_seqs": 1024, "max_num_batched_tokens": 8192}  # as `vllm serve` on an H100
    settings = {**VLLM, "policy": serve, "profile": {"model": "qwen3-32b", "device": "H100", "tensor_parallel": 2}}
    yield "## Qwen3-32B on 8 x 2 H100, 150 groups of 5 prompts (6,000 + 1,200 tokens), 1,000 generated\n"
    heads = [f"{what}, {how}" for what in ("TTFT", "tok/s") for how in ("round robin", "precise")]
    yield "| requests/s | " + " | ".join(f"{head}: published | simulated" for head in heads) + " |"
    yield "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    with (data / "cluster" / "llmd_precise_ladder.csv").open(newline="") as file:
        stages = list(csv.DictReader(file))
    for stage in stages:
        rate, seconds = float(stage["rate_rps"]), float(stage["stage_s"])
        requests, since = shared_prefixes(rate, seconds)
        found = [run(settings, 8, router, requests, since) for router in ("round-robin", "llm-d-precise")]
        cells = [
            cell
            for what, of in (("ttft_mean_s", "ttft"), ("output_tok_s", "tokens_per_second"))
            for name, r in zip(("rr", "precise"), found)
            for cell in (stage[f"{name}_{what}"], f"{getattr(r, of):.{3 if of == 'ttft' else 0}f}")
        ]
        yield f"| {rate:.0f} | {' | '.join(cells)} |"
    yield ""


def shared_prefixes(rate: float, seconds: float) -> tuple[list[ClientRequest], float]:
    """Return the requests of a stage after the warm-up of 50 s, and when the stage starts."""
    random, since = stream(0, "prompts"), 250.0
    order = random.permutation(750).tolist()
    warm = random.exponential(1 / 15, 750).cumsum()
    times = [*warm, *(since + random.exponential(1 / rate, int(rate * seconds)).cumsum())]
    found = []
    for number, time in enumerate(times):
        prompt = order[number % 750]
        content = content_of_pieces([(("group", prompt // 5), 6000), (("question", prompt), 1200)])
        found.append(ClientRequest(number, float(time), 7200, 1000, content=content))
    return found, since


def nodes(data: Path) -> Iterable[str]:
    """Simulate the prefill nodes of Mooncake's paper, at the rate of the trace."""
    settings = {**VLLM, "profile": {"model": "llama-3.1-70b", "device": "A100-80GB", "tensor_parallel": 8}}
    local = {"name": "conductor", "transfer_per_token": 1e-4}  # a copy costs as much as a prefill: none is made
    rate = RATES[8]
    requests = conversation(data, rate, output=1)
    yield f"## Prefill of Mooncake's trace on 8 nodes with Llama-3.1-70B, {rate} requests/s\n"
    yield "| policy of the paper | router | TTFT, published | simulated |\n| --- | --- | ---: | ---: |"
    for policy, name, router, published in (
        ("local cache aware", "conductor without copies", local, 3.58),
        ("load balancing", "least-requests", "least-requests", 5.27),
        ("random", "random", "random", 19.65),
    ):
        yield f"| {policy} | {name} | {published} s | {run(settings, 8, router, requests).ttft:.2f} s |"
    yield ""


PARTS = {"mooncake": mooncake, "thresholds": thresholds, "prefix": prefix, "ladder": ladder, "nodes": nodes}


def main() -> int:
    """Write the tables."""
    names = [name for name in sys.argv[1:] if name in PARTS] or list(PARTS)
    data = next((Path(name) for name in sys.argv[1:] if name not in PARTS), DATA)
    lines = ["# Routers compared", "", "Written by `python benchmarks/routers.py`; settings are in that file.", ""]
    for name in names:
        for line in PARTS[name](data):
            print(line, flush=True)
            lines.append(line)
    if len(names) == len(PARTS):
        RESULT.write_text("\n".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

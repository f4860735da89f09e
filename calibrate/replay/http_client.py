"""Replay against a running server: send a trace over HTTP and record the responses as a measured run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

import numpy as np
from servesim.calibrate.client.load_generator import LoadGenerator, first_model, send
from servesim.calibrate.client.prompts import Prompts, new_seed
from servesim.calibrate.client.protocols import Api, LlmServing, OpenAI
from servesim.calibrate.live.answer_record import spread_sample
from servesim.config.scenario import Scenario
from servesim.core import BadInput, Request
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost
from servesim.runs.intervals import intervals_of, simulate_draws
from servesim.runs.run_folder import run_data
from servesim.runs.simulate import copy_requests, simulate
from servesim.traces.trace import Trace

from .http_token_check import check_over_http, check_repeatable
from .live_run import MeasuredRun, run_from_result
from .replay import ProgressLine, ReplayedScenario
from .verify import compare


@dataclass(frozen=True)
class Target:
    """A server, and how to send requests to it."""

    url: str
    api: str = "openai"  # or llm-serving
    model: Optional[str] = None  # served name; None: the first model that the server lists
    timeout: float = 3600.0  # seconds per request
    warm_up: int = 0  # warm-up requests, not measured
    prompt_seed: str = field(default_factory=new_seed)  # a new one gives prompts that the server cannot have cached

    def check_url(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise BadInput(f"--url: expected http://HOST:PORT, got {self.url!r}")

    def make_api(self, prompts: Prompts) -> Api:
        if self.api == "llm-serving":
            return LlmServing(prompts)
        return OpenAI(self.model or first_model(self.url), prompts)


def replay_against(
    target: Target,
    name: str,
    scenario: Scenario,
    requests: Sequence[Request],
    profile: Optional[Profile],
    quiet: bool,
    block: Optional[int] = None,  # prompt tokens per hash id of the trace
    draws: int = 0,  # random cost models, for intervals
    check_tokens: Optional[int] = None,  # requests to send again alone
) -> ReplayedScenario:
    """Send requests to a server; with a profile, simulate and compare too."""
    target.check_url()
    sample = spread_sample(requests, check_tokens or 0, scenario.seed)
    if sample:
        api = target.make_api(Prompts(f"{target.prompt_seed}/{name}/repeated", block))
        check_repeatable(target.url, api, sample, target.timeout)
    # Each scenario of a replay, and its warm-up, has its own prompts: the server must not have cached them.
    if target.warm_up:
        api = target.make_api(Prompts(f"{target.prompt_seed}/{name}/warm-up", block))
        send(target.url, api, warm_up_requests(requests[: target.warm_up]), target.timeout)
    api = target.make_api(Prompts(f"{target.prompt_seed}/{name}", block))
    line = ProgressLine(name, len(requests), quiet)
    load = send(
        target.url, api, requests, target.timeout, lambda state: line(progress(state, len(requests))), set(sample)
    )
    live = run_from_responses(load, scenario, profile or Profile("none", LinearCost()), requests)
    if sample and not load.stopped:
        live.token_check = check_over_http(target.url, api, load, sample, target.timeout, line)
    line.end()
    live.settings = {"prompt_seed": target.prompt_seed}
    replayed = ReplayedScenario(name, live, replace(run_data(live), name=name))
    if profile is not None and not live.stopped:
        trace = Trace(list(requests), "replay", "synth")
        run = simulate(scenario, trace, profile=profile)
        if draws:
            run.intervals = intervals_of(run.result(), simulate_draws(scenario, profile, draws, trace), profile)
        replayed.run = run
        replayed.simulated = replace(run_data(replayed.run), name=name)
        replayed.comparison = compare(replayed.simulated, replayed.measured)
    return replayed


def progress(state: dict[str, Any], total: int) -> dict[str, Any]:
    """Return the state for the progress line. Open requests count as running: a client cannot see the queues."""
    rate = state["written"] / max(state["t"], 1e-9)
    return {**state, "waiting": total - state["done"] - state["open"], "running": state["open"], "swapped": 0,
            "tokens_per_s": rate}  # fmt: skip


def warm_up_requests(requests: Sequence[Request]) -> list[Request]:
    """Return copies that all arrive at time 0 and generate at most 16 tokens."""
    copies = copy_requests(requests)
    for request in copies:
        request.arrival = request.sent = 0.0
        request.follows = None
        request.limit = min(16, request.limit)
    return copies


def run_from_responses(
    load: LoadGenerator, scenario: Scenario, profile: Profile, requests: Sequence[Request]
) -> MeasuredRun:
    """Return the client-side times as a measured run; latencies count from the actual send time."""
    rows, gaps = [], []
    for sent in load.sent_requests:
        first = sent.times[0] if sent.times else None
        last = sent.times[-1] if sent.times else None
        gaps += np.diff(sent.times).tolist()
        start = sent.due if sent.sent_at is None else sent.sent_at
        end = sent.ended_at if sent.outcome is not None else None
        outcome = sent.outcome
        if outcome == "finished" and first is None:
            outcome, sent.reason = "failed", "a response without a token"
        rows.append([sent.written, start, start, None, first, last, end, end, 0.0, 0.0, 0.0, 0.0, 0,
                     outcome, sent.reason])  # fmt: skip
    result = {
        "requests": rows, "calls": [], "gaps": [gaps, [1] * len(gaps)], "work": {}, "stuck": None,
        "end": max((sent.ended_at or 0.0 for sent in load.sent_requests), default=0.0), "stopped": load.stopped,
        "backend": {"url": load.url}, "decisions": [], "host": [0.0, 0.0], "late": 0.0,
        "blocks_left": None, "blocks": None,
    }  # fmt: skip
    live = run_from_result(scenario, profile, copy_requests(requests), result)
    live.extra = client_metrics(load)
    return live


def client_metrics(load: LoadGenerator) -> dict[str, Any]:
    """Return metrics of the load generator itself: lateness, failures, pings."""
    late = np.array([1e3 * (s.sent_at - s.due) for s in load.sent_requests if s.sent_at is not None])
    reasons = Counter(sent.reason for sent in load.sent_requests if sent.reason)
    finished = [s for s in load.sent_requests if s.outcome == "finished"]
    wrong = sum(s.written != min(s.request.output, s.request.limit) for s in finished)
    return {
        "lateness_ms": {} if not len(late) else {
            "mean": float(late.mean()), "p99": float(np.percentile(late, 99)), "max": float(late.max()),
        },
        "reasons": dict(reasons.most_common(20)),
        "wrong_length": wrong,
        "prompt_tokens": served_prompt_tokens(load),
        "pings": sum(sent.pings for sent in load.sent_requests),
        "most_open": load.max_open,
    }  # fmt: skip


def served_prompt_tokens(load: LoadGenerator) -> dict[str, Any]:
    """Compare the requested prompt lengths with those that the server counted, over the requests that it counted."""
    counted = [(s.request.prompt, s.prompt_tokens) for s in load.sent_requests if s.prompt_tokens is not None]
    return {
        "requests_counted": len(counted),
        "requested": sum(requested for requested, _ in counted),
        "served": sum(served for _, served in counted),
        "requests_different": sum(requested != served for requested, served in counted),
    }

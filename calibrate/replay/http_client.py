"""A replay from the client's side: a trace sent to a running server, and its answers as a measured run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import numpy as np
from servesim.calibrate.client.load_generator import Load, first_model, send
from servesim.calibrate.client.protocols import Api, LlmServing, OpenAI
from servesim.config.scenario import Scenario
from servesim.core import BadInput, Request
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost
from servesim.runs.run_folder import run_data
from servesim.runs.simulate import fresh, simulate
from servesim.traces.trace import Trace

from .live_run import LiveRun, live_run
from .replay import ProgressLine, Replayed
from .verify import compare


@dataclass(frozen=True)
class Target:
    """The server that requests are sent to, and how."""

    url: str
    api: str = "openai"  # or llm-serving
    model: Optional[str] = None  # its name there; None for the first that the server lists
    timeout: float = 3600.0  # seconds after which a request is given up
    warm_up: int = 0  # requests sent before and not measured


def replay_against(
    target: Target, name: str, scenario: Scenario, requests: Sequence[Request], profile: Optional[Profile], quiet: bool
) -> Replayed:
    """Send requests to a server; with a profile, simulate and compare too."""
    if not target.url.startswith(("http://", "https://")):
        raise BadInput(f"--url: expected http://HOST:PORT, got {target.url!r}")
    api: Api = LlmServing() if target.api == "llm-serving" else OpenAI(target.model or first_model(target.url))
    if target.warm_up:
        send(target.url, api, at_once(requests[: target.warm_up]), target.timeout)
    line = ProgressLine(name, len(requests), quiet)
    load = send(target.url, api, requests, target.timeout, lambda state: line(shown(state, len(requests))))
    line.end()
    live = as_live(load, scenario, profile or Profile("none", LinearCost()), requests)
    replayed = Replayed(name, live, replace(run_data(live), name=name))
    if profile is not None and not live.stopped:
        trace = Trace(list(requests), "replay", "synth")
        replayed.run = simulate(scenario, trace, profile=profile)
        replayed.simulated = replace(run_data(replayed.run), name=name)
        replayed.comparison = compare(replayed.simulated, replayed.measured)
    return replayed


def shown(state: dict[str, Any], total: int) -> dict[str, Any]:
    """Return a client's state as the progress line shows it: what is open is waiting or running, nobody can tell."""
    rate = state["written"] / max(state["t"], 1e-9)
    return {**state, "waiting": total - state["done"] - state["open"], "running": state["open"], "swapped": 0,
            "tokens_per_s": rate}  # fmt: skip


def at_once(requests: Sequence[Request]) -> list[Request]:
    """Return copies that all arrive now and write little."""
    copies = fresh(requests)
    for request in copies:
        request.arrival, request.after = 0.0, None
        request.limit = min(16, request.limit)
    return copies


def as_live(load: Load, scenario: Scenario, profile: Profile, requests: Sequence[Request]) -> LiveRun:
    """Return what the clients saw as a measured run; latencies count from the real sending."""
    rows, gaps = [], []
    for sending in load.sendings:
        first = sending.times[0] if sending.times else None
        last = sending.times[-1] if sending.times else None
        gaps += np.diff(sending.times).tolist()
        sent = sending.due if sending.sent is None else sending.sent
        end = sending.end if sending.outcome is not None else None
        outcome = sending.outcome
        if outcome == "finished" and first is None:
            outcome, sending.reason = "failed", "an answer without a token"
        rows.append([sending.written, sent, sent, None, first, last, end, end, 0.0, 0.0, 0.0, 0.0, 0,
                     outcome, sending.reason])  # fmt: skip
    told = {
        "requests": rows, "calls": [], "gaps": [gaps, [1] * len(gaps)], "computed": 0, "stuck": None,
        "end": max((sending.end or 0.0 for sending in load.sendings), default=0.0), "stopped": load.stopped,
        "backend": {"url": load.url}, "decisions": [], "host": [0.0, 0.0], "late": 0.0,
        "blocks_left": None, "blocks": None,
    }  # fmt: skip
    live = live_run(scenario, profile, fresh(requests), told)
    live.extra = about(load)
    return live


def about(load: Load) -> dict[str, Any]:
    """Return how the sending itself went."""
    late = np.array([1e3 * (s.sent - s.due) for s in load.sendings if s.sent is not None])
    reasons = Counter(sending.reason for sending in load.sendings if sending.reason)
    wrong = sum(s.outcome == "finished" and s.written != min(s.request.output, s.request.limit) for s in load.sendings)
    return {
        "lateness_ms": {} if not len(late) else {
            "mean": float(late.mean()), "p99": float(np.percentile(late, 99)), "max": float(late.max()),
        },
        "reasons": dict(reasons.most_common(20)),
        "wrong_length": wrong,
        "pings": sum(sending.pings for sending in load.sendings),
        "most_open": load.most_open,
    }  # fmt: skip

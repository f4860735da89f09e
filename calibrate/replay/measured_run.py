"""A measured run: from the live driver or from the result file of a load generator; its files and its printed text.

Its files are those of `sim run`, plus sent requests, decisions and model calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from servesim.calibrate.live.replay_job import DRAFT_COUNTS, RESULT_FIELDS
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput, Request, Stuck
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost
from servesim.costs.model_arithmetic import known_peak, model_of, stored_peak
from servesim.engine.build import build_server
from servesim.engine.work_totals import work_from_json
from servesim.files.step_table import ModelCall, model_call, write_calls
from servesim.runs.run_folder import DECISIONS, DEVICE, SENT, STEPS, TIMELINE, write_decisions, write_run, write_sent
from servesim.runs.simulate import Run, measure
from servesim.runs.text import SHOWN_PERCENTILES, benchmark, cache_lines, title_line, utilisation_lines
from servesim.runs.timeline import write_measured_timeline
from servesim.runs.utilisation import TOKENS, describe_counters, summarise, write_counters
from servesim.traces.read.benchmark_results import read_results, results_format
from servesim.traces.read.source import Source

from .token_check import TokenCheck, check_from_worker

NO_PROFILE = Profile("none", LinearCost())  # of runs that are not simulated
UNKNOWN = dict.fromkeys(  # results that no client can measure
    ("preemptions", "model_calls", "busy_s", "prompt_tokens_computed", "padded_prompt_tokens", "padded_decode_rows",
     "host_s", "device_s")
)  # fmt: skip


@dataclass
class MeasuredRun(Run):
    """A run that was measured instead of simulated."""

    backend: Mapping[str, Any] = field(default_factory=dict)  # its description
    model_calls: Sequence[ModelCall] = ()
    decisions: Sequence[Mapping[str, Any]] = ()
    host: Sequence[float] = ()  # host overhead, measured in the warm-up: the fields of costs.parts.HostPart
    warm_up_calls: Sequence[ModelCall] = ()
    stopped: bool = False  # before all requests were served
    extra: dict[str, Any] = field(default_factory=dict)  # further metrics
    token_check: Optional[TokenCheck] = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # for the manifest: what else is needed to repeat it
    counters: Optional[Mapping[str, Any]] = None  # of the device; see runs/utilisation.py

    @property
    def about(self) -> Mapping[str, Any]:
        """Description of the device and the model: of the profile, else of the backend."""
        backend, profile = self.backend, self.profile.about
        if model_of(profile) is not None or backend.get("backend") == "fake":  # a fake backend has no model
            return profile
        return {**backend, "peak": stored_peak(known_peak(backend))}

    @property
    def counts_drafts(self) -> bool:
        return False

    @property
    def limit_metrics(self) -> dict[str, Any]:
        """Nothing: only a simulation knows what waiting requests lack."""
        return {}

    @property
    def device(self) -> Optional[dict[str, Any]]:
        """Means of the device counters during the run, None without samples."""
        if self.counters is None or not self.counters["samples"]:
            return None
        return summarise(self.counters, self.end)

    @property
    def energy(self) -> Optional[float]:
        """Joules per 1,000 generated tokens, from the measured power."""
        joules = None if self.device is None else self.device["energy_j"]
        return None if joules is None or not self.measures.outputs else TOKENS * joules / self.measures.outputs

    def result(self) -> dict[str, Any]:
        """Return the metrics of a run, then those that only a measurement has."""
        calls = self.model_calls
        return {
            **super().result(),
            "backend": dict(self.backend),
            "host_s": sum(call.called - call.start for call in calls),
            "device_s": sum(call.end - call.called for call in calls),
            "host": list(self.host),
            "device": self.device,
            "stopped": self.stopped,
            **self.extra,
            **({} if self.token_check is None else {"token_check": self.token_check.as_dict()}),
        }


def run_from_result(
    scenario: Scenario, profile: Profile, requests: Sequence[Request], result: Mapping[str, Any]
) -> MeasuredRun:
    """Return a measured run from the result of the live driver; fills in the times of the requests."""
    for request, (written, arrival, *times) in zip(requests, result["requests"]):
        request._written, request.sent = written, arrival
        for name, value in zip(RESULT_FIELDS, times):
            setattr(request, name, value)
    server = build_server(scenario.make_policy(), scenario.engine.model_dump())
    for seconds, count in zip(*result["gaps"]):
        server.token_gaps.add(seconds, count)
    if server.prefix_cache is not None:
        for name, count in (result.get("prefix_cache") or {}).items():
            setattr(server.prefix_cache.stats, name, count)
    drafts = result.get("drafts")
    if server.drafts is not None and drafts is not None:
        for name in DRAFT_COUNTS:
            setattr(server.drafts, name, drafts[name])
    calls = [model_call(row) for row in result.get("calls", ())]
    stuck = Stuck(result["stuck"], [], result["end"]) if result.get("stuck") else None
    return MeasuredRun(
        scenario=scenario,
        profile=profile,
        requests=requests,
        measures=measure(scenario, requests, server),
        server=server,
        calls=len(calls),
        busy_seconds=sum(call.end - call.start for call in calls),
        end=result["end"],
        padded_tokens=0,
        padded_rows=0,
        stuck=stuck,
        work=work_from_json(result.get("work", {})),  # recorded results have none
        counters=result.get("counters"),
        drafts=[] if server.drafts is None else [server.drafts],
        backend=result["backend"],
        model_calls=calls,
        decisions=result.get("decisions", ()),
        host=result.get("host", ()),
        warm_up_calls=[model_call(row) for row in result.get("warm_up_calls", ())],
        stopped=result["stopped"],
        token_check=check_from_worker(result.get("token_check")),
        extra={
            "late_s": result.get("late"),
            "blocks_left": result.get("blocks_left"),
            "blocks": result.get("blocks"),
            **({} if drafts is None else {"drafts": drafts}),
        },
    )


def run_from_client(
    scenario: Scenario, profile: Profile, requests: Sequence[Request], gaps: Sequence[float], end: float,
    backend: Mapping[str, Any], stopped: bool = False,
) -> MeasuredRun:  # fmt: skip
    """Return a measured run of requests with the times of a client, which sees no queues, blocks or model calls."""
    result = {"requests": (), "gaps": [gaps, [1] * len(gaps)], "end": end, "backend": backend, "stopped": stopped}
    run = run_from_result(scenario, profile, requests, result)
    run.extra = {**UNKNOWN, "mean_seconds": {}}
    return run


def set_client_times(
    request: Request, sent: float, written: int = 0, first: Optional[float] = None, last: Optional[float] = None,
    end: Optional[float] = None, outcome: Optional[str] = None, reason: Optional[str] = None,
) -> None:  # fmt: skip
    """Set the times of a request as a client sees them."""
    request.sent = request.visible_at = sent
    request._written, request.first_token, request.last_token = written, first, last
    request.finish = request.client_end = end
    request.outcome, request.reason = outcome, reason


def benchmark_run(path: Path, index: Optional[int] = None) -> MeasuredRun:
    """Read the result file of a load generator. `index` chooses one of several benchmarks in a file, from 0."""
    source = Source(path)
    content = read_results(source, index)
    results = content.requests
    if all(result.failed for result in results):
        raise BadInput(f"{path}: expected at least one successful request, got none")
    requests = [Request(r.id, r.arrival, max(1, r.prompt), max(1, r.output)) for r in results]
    gaps = [gap for result in results for gap in result.gaps]
    end = max(result.arrival + result.e2e for result in results)
    scenario = scenario_from({"trace": {"path": str(path)}}, str(path))
    backend = {"results": path.name, "format": results_format(source), "notes": list(content.notes)}
    for request, result in zip(requests, results):
        if content.is_summary:  # it has no times of requests
            set_client_times(request, result.arrival)
        elif result.failed:
            set_client_times(request, result.arrival, outcome="failed", reason=result.failed)
        else:
            first, last = result.arrival + result.ttft, result.arrival + result.e2e
            set_client_times(request, result.arrival, result.output, first, last, last, "finished")
    run = run_from_client(scenario, NO_PROFILE, requests, gaps, end, backend)
    if content.is_summary:  # its metrics are those that the file reports, and no others
        unknown = dict.fromkeys(run.measures.as_result())
        run.extra |= {**unknown, "makespan": None, "outcomes": {}, **content.figures}
    return run


def write_live(run: MeasuredRun, folder: Path) -> None:
    """Write the files of a measured run."""
    write_run(run, folder, run.settings)
    write_sent(run.requests, folder / SENT)
    if run.decisions:
        write_decisions(run.decisions, folder / DECISIONS)
    if run.model_calls:
        write_calls(run.model_calls, folder / STEPS)
    rows = run.counters["samples"] if run.counters is not None else []
    if rows:
        write_counters(rows, folder / DEVICE)
    if run.model_calls or rows:
        write_measured_timeline(run.model_calls, run.requests, rows, folder / TIMELINE)


def describe_live(live: MeasuredRun, title: str, percentiles: Sequence[float] = SHOWN_PERCENTILES) -> list[str]:
    """Return the lines that `sim replay` prints for a measured run."""
    lines = [title_line(f" {title} (measured) ", "="), *benchmark(live, percentiles)]
    if live.model_calls:
        percent = 100 * live.result()["host_s"] / max(live.busy_seconds, 1e-9)
        lines.append(f"model calls: {len(live.model_calls)}, host overhead: {percent:.1f} % of their time")
    lines += [*cache_lines(live.result()), *describe_drafts(live), *describe_device(live), *describe_requests(live)]
    if live.stopped:
        lines.append("stopped early; these are the results so far")
    return [*lines, *([str(live.stuck)] if live.stuck else [])]


def describe_drafts(live: MeasuredRun) -> Iterator[str]:
    """Yield how many drafts the model accepted, by position. The simulation accepts the same."""
    drafts = live.extra.get("drafts")
    if drafts is not None and drafts["rows"]:
        rates = ", ".join(f"{100 * count / drafts['rows']:.1f} %" for count in drafts["accepted_at"])
        tokens = 1 + drafts["accepted"] / drafts["rows"]
        yield (
            f"drafts: {drafts['accepted']} of {drafts['drafted']} accepted, by position {rates}; {tokens:.2f} tokens "
            "per verified row; the simulation accepts the same"
        )


def describe_device(live: MeasuredRun) -> Iterator[str]:
    """Yield MFU, MBU, energy, and the counters of the device."""
    yield from utilisation_lines(live.result())
    if live.device is not None:
        yield describe_counters(live.device)
        if str(live.backend.get("device", "")).lower().startswith("cpu"):
            yield "the model ran on a CPU: these counters and the energy are of another device"


def describe_requests(live: MeasuredRun) -> Iterator[str]:
    """Yield the requests that did not finish, how the load generator sent them, and what the server counted."""
    yield from (f"requests {name}: {n}" for name, n in live.measures.outcomes().items() if name != "finished")
    if late := live.extra.get("lateness_ms"):
        yield f"send lateness: mean {late['mean']:.2f} ms, max {late['max']:.2f} ms"
        yield f"max open streams: {live.extra['max_open']}"
    if repeated := live.extra.get("repeated"):
        yield f"sent again after a dropped connection: {repeated}"
    if prompts := live.extra.get("prompt_tokens"):
        yield describe_prompts(prompts)
        yield f"prompt seed: {live.settings['prompt_seed']}"
    yield from (f"{count} x {reason}" for reason, count in live.extra.get("reasons", {}).items())
    if short := live.extra.get("short_answers", {}).get("requests"):
        answers = live.extra["short_answers"]
        yield (
            f"answers with fewer tokens than asked count as failed: {short}, with {answers['tokens']} of "
            f"{answers['asked']} tokens; the server must not end at an end token (OpenAI requests have ignore_eos: "
            "true) and must allow these lengths"
        )
    yield from describe_server(live)


def describe_server(live: MeasuredRun) -> Iterator[str]:
    """Yield what the server counted itself, or the round trip of small requests."""
    counts, finished = live.extra.get("server", {}), len(live.measures.done)
    if ttft := live.extra.get("server_latencies", {}).get("mean_ttft_ms"):
        outside = live.result()["mean_ttft_ms"] - ttft
        yield f"mean TTFT in the server: {ttft:.2f} ms; {outside:.2f} ms more with network, HTTP and client"
    elif trip := live.extra.get("round_trip_ms"):
        yield f"round trip: {trip:.2f} ms, a part of every TTFT (median of small requests without a model call)"
    if counts.get("cached_tokens"):
        yield f"prompt tokens from the prefix cache of the server: {counts['cached_tokens']}"
    if "drafted" in counts:
        simulated = counts.get("simulated")
        also = f"; simulated: {simulated['drafted']}, {simulated['accepted']}" if simulated else ""
        yield f"drafted tokens of the server: {counts['drafted']}, accepted: {counts['accepted']}{also}"
    if counts.get("requests", finished) != finished:
        served = f"the server ended {counts['requests']} requests, {finished} of this run finished"
        yield f"{served}: its latencies are not compared, and its counts include all requests"
    yield from map(describe_replica, live.extra.get("servers", ()))


def describe_replica(server: Mapping[str, Any]) -> str:
    """Return the line about one of several servers: its requests and hits, measured and simulated."""
    simulated = server.get("simulated", {})
    parts = []
    for key, unit in (("requests", "requests"), ("cached_tokens", "prompt tokens from its prefix cache")):
        if key in server:
            parts.append(f"{server[key]} {unit}" + (f" (simulated {simulated[key]})" if simulated else ""))
    return f"{server['url']}: {', '.join(parts) or 'no counts'}"


def describe_prompts(prompts: Mapping[str, int]) -> str:
    """Return the line about the prompt lengths: requested, and as the server counts them."""
    if not prompts["requests_counted"]:
        return "prompt tokens: the server does not report how many it counted"
    text = f"prompt tokens: {prompts['requested']} requested, {prompts['served']} counted by the server"
    different = prompts["requests_different"]
    return text + (f" (different in {different} of {prompts['requests_counted']} requests)" if different else "")

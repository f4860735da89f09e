"""Replay against a running server: send a trace over HTTP and record the responses as a measured run.

The token check sends requests of the run again, one at a time, and compares the answers. A server generates greedily
(temperature 0). Token ids are compared if the server sends them, else the texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Callable, Optional, Union

import numpy as np
from servesim.calibrate.client.load_generator import LoadGenerator, SentRequest, send
from servesim.calibrate.client.prompts import Prompts, new_seed
from servesim.calibrate.client.protocols import Api, LlmServing, OpenAI, TextCompletions, output_length
from servesim.calibrate.client.routed import RoutedServers
from servesim.calibrate.client.server_counters import (
    LATENCIES,
    ServerCounts,
    add_counters,
    counted_between,
    read_counters,
    read_settings,
    round_trip_ms,
    served_model,
)
from servesim.calibrate.live.recorded_answers import spread_sample
from servesim.config.scenario import Scenario
from servesim.core import BadInput, Request
from servesim.core.content import Content
from servesim.costs.device_profile import Profile
from servesim.engine.router_view import RouterTexts
from servesim.runs.build import copy_requests
from servesim.runs.intervals import intervals_of, simulate_draws
from servesim.runs.run_folder import run_data
from servesim.runs.simulate import Run, simulate
from servesim.traces.trace import Trace

from .measured_run import NO_PROFILE, MeasuredRun, run_from_client, set_client_times
from .replay import ProgressLine, ReplayedScenario
from .token_check import CheckedAnswer, Difference, TokenCheck
from .verify import compare, setting_notes

Answer = Union[list[int], str]  # token ids or text

MIN_REPORT_S = 0.05  # between two reports to a router: a server needs some milliseconds for each
REPEATED_REQUESTS = 4  # sent twice before the run, to see whether the server repeats its answers
REPEATED_TOKENS = 8  # of each
SHOWN_CHARACTERS = 20  # of a text at its first difference


@dataclass(frozen=True)
class Target:
    """A server, and how to send requests to it."""

    url: str
    api: str = "openai"  # or openai-text, llm-serving
    model: Optional[str] = None  # served name; None: the first model that the server lists
    timeout: float = 3600.0  # seconds per request
    warm_up: int = 0  # warm-up requests, not measured
    prompt_seed: str = field(default_factory=new_seed)  # a new one gives prompts that the server cannot have cached
    vocabulary: Optional[int] = None  # token ids of the model, if known
    servers: tuple[str, ...] = ()  # behind a router; default: the only server is `url`
    routes: bool = False  # whether the router of the scenario sends to `servers`; else `url` does

    @property
    def all_servers(self) -> tuple[str, ...]:
        """The servers, without a router that is a process of its own."""
        return self.servers or (self.url,)

    def make_api(self, name: str) -> Api:
        """Return the interface of the server. Each name has its own prompts: the server must not have cached them."""
        prompts = Prompts(f"{self.prompt_seed}/{name}", self.vocabulary)
        if self.api == "llm-serving":
            return LlmServing(prompts)
        model, _ = served_model(self.all_servers[0], self.model)  # a router may not know the model
        return TextCompletions(model, prompts) if self.api == "openai-text" else OpenAI(model, prompts)

    def routed_servers(self, scenario: Scenario, api: Api, first: Request) -> Optional[RoutedServers]:
        """Return the servers behind the router of a scenario; None if requests go to one address."""
        cluster = scenario.cluster
        if not self.routes or cluster is None:
            return None
        router = cluster.make_router()
        staleness = router.report_interval if cluster.staleness is None else cluster.staleness
        interval = max(staleness, MIN_REPORT_S) if router.reads_reports else 0.0
        servers = RoutedServers(self.servers, router, RouterTexts(api.prompts.words), interval, scenario.seed)
        if servers.asks_caches(first):
            raise BadInput(
                f"cluster.router {cluster.router['name']}: asks what the servers have cached, which they do not tell; "
                "expected a router, or settings of it, with a memory of its own"
            )
        return servers


def replay_against(
    target: Target,
    name: str,
    scenario: Scenario,
    requests: Sequence[Request],
    profile: Optional[Profile],
    quiet: bool,
    draws: int = 0,  # random cost models, for intervals
    check_tokens: Optional[int] = None,  # requests to send again alone
    warn: Callable[[str], None] = lambda text: None,
) -> ReplayedScenario:
    """Send requests to a server; with a profile, simulate and compare too. Before, `warn` of settings that differ."""
    settings = read_settings(target.all_servers[0])
    for text in setting_notes(scenario, settings):
        warn(text)
    sample = spread_sample(requests, check_tokens or 0, scenario.seed)
    if sample:
        api = target.make_api(f"{name}/repeated")
        check_repeatable(target.url, api, sample, target.timeout)
    if target.warm_up:
        api = target.make_api(f"{name}/warm-up")
        for url in target.servers if target.routes else [target.url]:
            send(url, api, warm_up_requests(requests[: target.warm_up]), target.timeout)
    api = target.make_api(name)
    line = ProgressLine(name, len(requests), quiet)
    before = [read_counters(url) for url in target.all_servers]
    servers = target.routed_servers(scenario, api, requests[0])
    generator = send(target.url, api, requests, target.timeout, line, set(sample), servers)
    forget_unknown_answers(requests, api.prompts)
    live = run_from_responses(generator, scenario, profile or NO_PROFILE, requests)
    add_server_counts(live, target, before, servers)
    live.extra["server_settings"] = settings
    if sample and not generator.stopped:
        live.token_check = check_over_http(target.url, api, generator, sample, target.timeout, line)
    line.end()
    live.settings = {"prompt_seed": target.prompt_seed}
    replayed = ReplayedScenario(name, live, replace(run_data(live), name=name))
    if profile is not None and not live.stopped:
        trace = Trace(list(requests), "replay", "synth")
        simulate_one = partial(simulate, text_of=api.prompts.words)
        run = simulate_one(scenario, trace, profile=profile)
        if draws:
            run.intervals = intervals_of(run, simulate_draws(scenario, profile, draws, trace, simulate_one), profile)
        replayed.run, replayed.simulated = run, replace(run_data(run), name=name)
        replayed.comparison = compare(replayed.simulated, replayed.measured)
        if "drafted" in live.extra["server"]:
            drafts = {name: sum(getattr(one, name) for one in run.drafts) for name in ("drafted", "accepted")}
            live.extra["server"]["simulated"] = drafts
        add_simulated_counts(live.extra.get("servers", []), run, target.routes)
    return replayed


def add_server_counts(
    live: MeasuredRun, target: Target, before: Sequence[ServerCounts], servers: Optional[RoutedServers]
) -> None:
    """Add what the servers counted during a run; `before` was read at its start. Without it, add the round trip."""
    after = [read_counters(url) for url in target.all_servers]
    counts = counted_between(add_counters(before), add_counters(after), len(live.measures.done))
    latencies = {metric: counts.pop(metric) for metric in LATENCIES if metric in counts}
    each: list[dict[str, Any]] = [{"url": url} for url in target.servers]
    for number, about in enumerate(each):
        about.update(counted_between(before[number], after[number], 0))
        if servers is not None:
            about["requests"] = servers.requests[number]
    live.extra |= {
        "preemptions": counts.pop("preemptions", None), "server": counts, "server_latencies": latencies,
        "round_trip_ms": None if latencies else round_trip_ms(target.url), **({"servers": each} if each else {}),
    }  # fmt: skip


def add_simulated_counts(servers: Sequence[dict[str, Any]], run: Run, same_order: bool) -> None:
    """Add the requests and cached tokens of each simulated replica to those of the servers.

    The order of the servers in a real router is not known. Their numbers of requests then give the order.
    """
    if run.replicas is None or len(run.replicas.rows) != len(servers):
        return
    counts = [[0, 0] for _ in servers]
    for request in run.requests:
        number = run.replicas.replica_of.get(request.id)
        if number is not None:
            counts[number][0] += 1
            counts[number][1] += request.cached_tokens
    if not same_order:
        servers = sorted(servers, key=lambda server: [server.get(key, 0) for key in ("requests", "cached_tokens")])
        counts.sort()
    for server, (requests, cached) in zip(servers, counts):
        server["simulated"] = {"requests": requests, "cached_tokens": cached}


def forget_unknown_answers(requests: Sequence[Request], prompts: Prompts) -> None:
    """Remove the names of answers whose token ids are unknown: later prompts then contained other texts."""
    for request in requests:
        content = request.content
        if content is not None and content.answer not in prompts.answers:
            request.content = Content(content.names, content.ends)


def warm_up_requests(requests: Sequence[Request]) -> list[Request]:
    """Return copies that all arrive at time 0 and generate at most 16 tokens."""
    copies = copy_requests(requests)
    for request in copies:
        request.arrival = request.sent = 0.0
        request.follows = None
        request.limit = min(16, request.limit)
    return copies


def run_from_responses(
    generator: LoadGenerator, scenario: Scenario, profile: Profile, requests: Sequence[Request]
) -> MeasuredRun:
    """Return the client-side times as a measured run; latencies count from the actual send time."""
    served, gaps = copy_requests(requests), list[float]()
    for request, sent in zip(served, generator.sent_requests):
        first = sent.times[0] if sent.times else None
        last = sent.times[-1] if sent.times else None
        # Tokens of a step with drafts arrive together: one gap.
        gaps += np.diff(sent.times if scenario.drafts is None else np.unique(sent.times)).tolist()
        start = sent.due if sent.sent_at is None else sent.sent_at
        end = sent.ended_at if sent.outcome is not None else None
        outcome = "failed" if is_short(sent) else sent.outcome
        set_client_times(request, start, sent.written, first, last, end, outcome, sent.reason)
    last_end = max((sent.ended_at or 0.0 for sent in generator.sent_requests), default=0.0)
    backend = {"url": generator.url}
    live = run_from_client(scenario, profile, served, gaps, last_end, backend, generator.stopped)
    live.extra |= client_metrics(generator)
    return live


def is_short(sent: SentRequest) -> bool:
    """Return whether a complete response has fewer tokens than asked: its latencies are those of another request."""
    return sent.outcome == "finished" and sent.written < output_length(sent.request)


def client_metrics(generator: LoadGenerator) -> dict[str, Any]:
    """Return metrics of the load generator itself: lateness, failures, pings."""
    late = np.array([1e3 * (s.sent_at - s.due) for s in generator.sent_requests if s.sent_at is not None])
    reasons = Counter(sent.reason for sent in generator.sent_requests if sent.reason)
    short = [sent for sent in generator.sent_requests if is_short(sent)]
    counted = [(s.request.prompt, s.prompt_tokens) for s in generator.sent_requests if s.prompt_tokens is not None]
    return {
        "lateness_ms": {} if not len(late) else {
            "mean": float(late.mean()), "p99": float(np.percentile(late, 99)), "max": float(late.max()),
        },
        "reasons": dict(reasons.most_common(20)),
        "short_answers": {
            "requests": len(short), "tokens": sum(sent.written for sent in short),
            "asked": sum(output_length(sent.request) for sent in short),
        },
        "prompt_tokens": {  # of the requests whose prompts the server has counted
            "requests_counted": len(counted), "requested": sum(asked for asked, _ in counted),
            "served": sum(served for _, served in counted),
            "requests_different": sum(asked != served for asked, served in counted),
        },
        "repeated": sum(sent.repeated for sent in generator.sent_requests),
        "pings": sum(sent.pings for sent in generator.sent_requests),
        "max_open": generator.max_open,
    }  # fmt: skip


def one_after_another(requests: Sequence[Request], max_tokens: Optional[int] = None) -> list[Request]:
    """Return copies in a chain: each is sent when the answer to the one before is complete."""
    copies = copy_requests(requests)
    before = None
    for request in copies:
        request.arrival = request.sent = request.think_time = 0.0
        request.follows, before = before, request.id
        if max_tokens is not None:
            request.limit = min(max_tokens, request.limit)
    return copies


def check_repeatable(url: str, api: Api, requests: Sequence[Request], timeout: float) -> None:
    """Raise BadInput if the server answers the same request in two ways, without other requests.

    A near tie can change one answer, so more than half must differ.
    """
    pairs = []
    for _ in range(2):
        chain = one_after_another(requests[:REPEATED_REQUESTS], REPEATED_TOKENS)
        pairs.append([answer_of(sent) for sent in send(url, api, chain, timeout, None, chain).sent_requests])
    both = [(first, second) for first, second in zip(*pairs) if first is not None and second is not None]
    different = sum(first != second for first, second in both)
    if different * 2 > len(both):
        raise BadInput(
            f"--check-tokens: expected a server that repeats its answers at temperature 0, but {url} answered "
            f"{different} of {len(both)} requests in two ways, each sent alone"
        )


def check_over_http(
    url: str,
    api: Api,
    generator: LoadGenerator,
    sample: Sequence[Request],
    timeout: float,
    progress: Callable[[Mapping[str, Any]], None] = lambda state: None,
) -> TokenCheck:
    """Send the sample again, one request at a time, and compare the answers with those of the run."""
    in_run = {sent.request: sent for sent in generator.sent_requests}
    chain = one_after_another(sample)
    report = {"to_check": len(sample)}
    again = send(
        url, api, chain, timeout, lambda state: progress({**report, "t": state["t"], "checked": state["done"]}), chain
    )
    answers, failed, unit = [], Counter[str](), "token"
    for request, sent in zip(sample, again.sent_requests):
        live, alone = answer_of(in_run[request]), answer_of(sent)
        if live is None or alone is None:
            failed["without a complete answer " + ("in the run" if live is None else "alone")] += 1
            continue
        if isinstance(live, str) or isinstance(alone, str):
            unit = "character"
        difference = first_difference(live, alone)
        number = int(difference is not None)
        answers.append(
            CheckedAnswer(request.id, request.prompt, sent.written, (), number, number, difference, difference)
        )
    seconds = max((sent.ended_at or 0.0 for sent in again.sent_requests), default=0.0)
    return TokenCheck(answers, len(sample), seconds, unit, stopped=again.stopped, failed=dict(failed))


def answer_of(sent: SentRequest) -> Optional[Answer]:
    """Return the token ids of a response, or its text if it has no ids; None if it is not complete."""
    if sent.outcome != "finished":
        return None
    events = [event for event in sent.events or () if event.tokens]
    if events and all(event.token_ids is not None for event in events):
        return [token for event in events for token in event.token_ids or ()]
    return "".join(event.text for event in events) or None


def first_difference(live: Answer, alone: Answer) -> Optional[Difference]:
    """Return where two answers differ first; None if they are equal."""
    if live == alone:
        return None
    pairs = enumerate(zip(live, alone))
    index = next((index for index, (a, b) in pairs if a != b), min(len(live), len(alone)))
    return Difference(index, at(live, index), at(alone, index))


def at(answer: Answer, index: int) -> Union[int, str, None]:
    """Return the token or the text at an index; None after the end."""
    if index >= len(answer):
        return None
    return answer[index : index + SHOWN_CHARACTERS] if isinstance(answer, str) else answer[index]

"""Simulate one scenario: returns the requests with their times and the metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import numpy as np
from servesim.config.memory import host_copy_times
from servesim.config.scenario import Scenario
from servesim.config.user_code import class_line, user_errors
from servesim.core import BadInput, BlockPool, ClientRequest, Policy, PolicyError, Request, Shape, StepCost, Stuck
from servesim.costs.device_profile import Profile, load_profile
from servesim.engine.drafts import Drafts, draft_metrics
from servesim.engine.fleet import Fleet
from servesim.engine.kv_cache import KvCache
from servesim.engine.kv_use import KvUse, kv_metrics
from servesim.engine.loop import Loop
from servesim.engine.notices import Observer
from servesim.engine.rules import rules_of
from servesim.engine.server import Server
from servesim.engine.several import Servers
from servesim.engine.simulated import SimulatedClock
from servesim.engine.stuck import BUILT_IN
from servesim.engine.work_totals import KindTotals
from servesim.traces.edit import repeat, set_rate
from servesim.traces.trace import Trace, gc_disabled, has_field

from .build import build_simulation
from .fleet import TextOf, build_fleet
from .limit import limit_of
from .metrics import Metrics
from .notes import Note
from .pools import profile_for, profiles_of, servers_of
from .prices import costs_per_million, price_per_second
from .replicas import Replicas, replicas_of
from .run_requests import RunRequests
from .utilisation import simulated_energy, utilisation


@dataclass
class Run:
    """The result of a simulated scenario."""

    scenario: Scenario
    profile: Profile
    requests: Sequence[Request]
    measures: Metrics
    server: Server
    calls: int  # model calls
    busy_seconds: float  # of model calls
    end: float  # time of the end of the last call
    padded_tokens: int  # padding tokens of prefills
    padded_rows: int  # padding rows of decodes
    outside_profile: list[str] = field(default_factory=list)  # shapes outside the measured range
    distance_outside: float = 0.0  # how far, see Profile.distance_outside
    reached: Mapping[str, float] = field(default_factory=dict)  # sizes of the largest steps, by field of a shape
    stuck: Optional[Stuck] = None
    intervals: Optional[Mapping[str, Any]] = None  # of the metrics, see intervals.py
    work: Mapping[str, KindTotals] = field(default_factory=dict)  # what the model calls computed, by kind of step
    notes: Sequence[Note] = ()  # see run_warnings.py
    fleet: Mapping[str, Any] = field(default_factory=dict)  # of a fleet whose replicas come and go
    kv_uses: Sequence[tuple[KvUse, BlockPool]] = ()  # of each server with KV blocks
    cache: Optional[KvCache] = None  # with the counts of all servers; None: that of the server
    drafts: Sequence[Drafts] = ()  # of each server with speculative decoding
    servers: int = 1
    seconds_there: Sequence[float] = ()  # of each replica, if they come and go
    replicas: Optional[Replicas] = None  # in a fleet with more than one

    @property
    def counts_drafts(self) -> bool:
        """Whether the drafts of every request are known, if there are any; not of a measured run."""
        return bool(self.drafts)

    @property
    def ran(self) -> Sequence[Request]:
        """The requests of the engine: one per answer, if it runs these apart; none of a measured run."""
        return self.requests.ran if isinstance(self.requests, RunRequests) else ()

    @property
    def prompt_tokens_computed(self) -> int:
        """Computed tokens of prompts, including recomputed ones."""
        return sum(sums.prompt_tokens for sums in self.work.values())

    @property
    def kv_metrics(self) -> dict[str, float]:
        """Use of the KV cache; empty for a measured run, and for an engine without KV blocks."""
        return kv_metrics(self.kv_uses)

    @property
    def cache_metrics(self) -> dict[str, float]:
        """Hits of the prefix cache, as vLLM counts them; empty without a cache."""
        cache = self.cache or self.server.prefix_cache
        if cache is None or not cache.stats.requests:
            return {}
        cost = profile_for(self.scenario, self.profile, "prefill").cost
        metrics = {**cache.stats.metrics(), "saved_prefill_s": saved_prefill_seconds(cost, self.ran)}
        if cache.host is not None:
            step, block = host_copy_times(self.scenario.engine, self.scenario.profile)
            copied = cache.host.copied_blocks
            metrics["host_cache_hits"] = copied * cache.pool.block_size
            metrics["host_copy_s"] = step * cache.host.copies + block * copied
        return metrics

    @property
    def limit_metrics(self) -> dict[str, Any]:
        """What limits the run; empty for a measured run."""
        limit = limit_of(self)
        return {**self.server.waits.metrics(self.end), "limit": limit.kind, "limit_text": limit.text}

    @property
    def about(self) -> Mapping[str, Any]:
        """Description of the device and the model, as in a profile; empty if the pools of a cluster differ in it."""
        profiles = self.profiles
        return profiles[0].about if len(profiles) == 1 else {}

    @property
    def profiles(self) -> list[Profile]:
        """The different profiles of the servers."""
        return profiles_of(self.scenario, self.profile)

    @property
    def energy(self) -> Optional[float]:
        """Joules per 1,000 generated tokens."""
        seconds = self.end * sum(self.shares_there)
        return simulated_energy(self.work, seconds, self.measures.outputs, self.about.get("power"))

    @property
    def shares_there(self) -> list[float]:
        """The part of the run in which each server was there."""
        makespan = self.measures.makespan
        return [seconds / makespan for seconds in self.seconds_there if makespan] or [1.0] * self.servers

    @property
    def price_per_second(self) -> Optional[float]:
        """What the devices cost while the run lasts; None if it is not known."""
        return price_per_second(self.scenario, self.profile, self.shares_there)

    def result(self) -> dict[str, Any]:
        """Return the content of result.json: metrics under vLLM's keys, then simulator-only metrics."""
        measured = self.measures.as_result()
        return {
            **measured,
            **self.measures.of_groups(),
            "makespan": self.measures.makespan,
            "preemptions": int(self.measures.requests.column("preemptions").sum()),
            "outcomes": self.measures.outcomes(),
            "model_calls": self.calls,
            "busy_s": self.busy_seconds,
            "prompt_tokens_computed": self.prompt_tokens_computed,
            "padded_prompt_tokens": self.padded_tokens,
            "padded_decode_rows": self.padded_rows,
            **self.kv_metrics,
            **self.cache_metrics,
            **draft_metrics(self.drafts),
            **self.limit_metrics,
            **({} if self.replicas is None else self.replicas.metrics),
            "mean_seconds": self.measures.time_breakdown(),
            **utilisation(self.work, self.about),
            "energy": self.energy,
            **costs_per_million(self.price_per_second, measured),
            **({"fleet": dict(self.fleet)} if self.fleet else {}),
            "outside_profile": self.outside_profile,
            "stuck": None if self.stuck is None else str(self.stuck),
            **({} if self.scenario.engine.sampling is None else {"sampling": self.scenario.engine.sampling}),
            **({} if self.intervals is None else {"intervals": self.intervals}),
            **({"warnings": [note.text for note in self.notes]} if self.notes else {}),
        }


def saved_prefill_seconds(cost: StepCost, requests: Sequence[Request]) -> float:
    """Return the seconds by which cached tokens shortened prefills, each computed alone and in one step."""
    seconds, table = 0.0, RunRequests.of(requests)
    hits = np.flatnonzero(table.column("cached_tokens"))
    for prompt, tokens in zip(table.column("prompt")[hits].tolist(), table.column("cached_tokens")[hits].tolist()):
        cached = min(tokens, prompt - 1)  # without those of later admissions
        rest = prompt - cached
        seconds += cost.seconds(Shape(1, prompt, prompt, prompt**2))
        seconds -= cost.seconds(Shape(1, rest, rest, rest**2, rest * cached))
    return seconds


def load_trace(scenario: Scenario) -> Trace:
    """Return the requests of a scenario's trace or workload."""
    if scenario.trace is not None:
        from servesim.traces.read.formats import load

        file = scenario.trace
        trace = load(
            file.path, file.format, file.columns, file.limit, file.tokenizer,
            unit=file.unit, sort=file.sort, seed=scenario.seed, window=file.window or (0.0, math.inf),
            conversations=file.conversations,
        )  # fmt: skip
        trace = trace if file.rate is None else set_rate(trace, file.rate)
        return trace if file.repeat == 1 else repeat(trace, file.repeat)
    if scenario.workload is not None:
        from servesim.traces.make.synth import synthesise

        return synthesise(scenario.workload, scenario.seed)
    raise BadInput("workload: expected a trace or a workload, got neither; try --trace FILE or `sim config init FILE`")


@gc_disabled()
def simulate(
    scenario: Scenario,
    trace: Optional[Trace] = None,
    observers: Sequence[Observer] = (),
    hold: bool = True,
    profile: Optional[Profile] = None,
    text_of: Optional[TextOf] = None,
) -> Run:
    """Run a scenario. If the engine gets stuck, the run ends and `Run.stuck` has the reason.

    `hold`: whether plans that hold are repeated without a call of the policy, which changes no result. `text_of` gives
    the prompts of real clients to the router of a cluster.
    """
    profile = load_profile(scenario.profile) if profile is None else profile
    trace = load_trace(scenario) if trace is None else trace
    check_drafted(trace.requests, scenario)
    requests = RunRequests(trace.requests, scenario.engine.client_timeout)
    ran: Iterable[Request] = requests.stream()
    if needs_all(scenario, trace):
        ran = requests.create_all(rules_of(scenario.make_policy()))
    servers: Union[Loop, Servers]
    if scenario.cluster is not None and has_field(trace.requests, "sampling"):
        raise BadInput("cluster: expected requests with one answer, the trace has some with several (n)")
    if scenario.fleet is not None:
        servers, clocks = build_fleet(scenario, scenario.fleet, ran, observers, hold, profile, text_of)
    else:
        servers, clock = build_simulation(scenario, ran, observers, hold, profile)
        clocks = [clock]
    return run_loop(servers, clocks, scenario, profile, requests)


def needs_all(scenario: Scenario, trace: Trace) -> bool:
    """Whether a run creates all requests at the start; see run_requests.py."""
    cluster, engine = scenario.cluster, scenario.engine
    if cluster is not None and (cluster.is_apart or cluster.changes() is not None):
        return True
    follows = any(has_field(trace.requests, name) for name in ("follows", "sampling"))
    return follows or engine.data_parallel_size > 1 or engine.front_end.end_lag or not trace.is_sorted


def check_drafted(requests: Sequence[ClientRequest], scenario: Scenario) -> None:
    """Raise BadInput if a request with drafts has no rate of acceptance but needs one, or if its model call fails."""
    if scenario.drafts is None:
        return
    needs_rates = scenario.drafts.acceptance == "column"
    for request in requests if needs_rates or has_field(requests, "fails_at_token") else ():
        if needs_rates and request.acceptance is None:
            raise BadInput(f"speculative.acceptance: expected the column acceptance, request {request.id} has none")
        if request.fails_at_token is not None:
            raise BadInput(f"speculative: expected requests without fails_at_token, request {request.id} has it")


def run_loop(
    loop: Union[Loop, Servers],
    clocks: Sequence[SimulatedClock],
    scenario: Scenario,
    profile: Profile,
    requests: Sequence[Request],
) -> Run:
    """Run a loop to its end and return the results."""
    stuck, policy = None, loop.policy
    servers = Servers([loop]) if isinstance(loop, Loop) else loop
    table = RunRequests.holding(requests, scenario.engine.client_timeout)
    if not type(policy).__module__.startswith(BUILT_IN):
        table.watched = loop.server
    try:
        with user_errors(getattr(loop, "router", None)), user_errors(policy):
            servers.run()
    except Stuck as error:
        stuck = error
    table.finish()
    if table.change is not None:
        raise changed_request(type(policy), *table.change[1:])
    return finished_run(servers, clocks, scenario, profile, table, stuck)


def changed_request(kind: type[Policy], request: Request, name: str) -> PolicyError:
    """Return the error of a policy that has changed what a client asks, which changes the results.

    The requests are compared after the run, because read-only fields would make the engine slower.
    """
    return PolicyError(
        f"{class_line(kind, 'decide')}: {kind.__name__} changed {name} of request {request.id}: "
        "expected a policy that changes no request"
    )


def finished_run(
    servers: Servers,
    clocks: Sequence[SimulatedClock],
    scenario: Scenario,
    profile: Profile,
    requests: RunRequests,
    stuck: Optional[Stuck],
) -> Run:
    """Return the results of servers that have run."""
    padding, loops = [clock.padding_counts for clock in clocks], servers.loops
    outside, distance = outside_profiles(scenario, profile, servers, clocks)
    measures, replicas = measure(scenario, requests, servers.server), None
    if isinstance(servers, Fleet):  # before the first replica gets the totals of all
        replicas = replicas_of(servers, requests, measures.makespan)
    return Run(
        scenario, profile, requests, measures, servers.server, servers.calls, servers.now - servers.idle_s,
        servers.now, sum(tokens for tokens, _ in padding), sum(rows for _, rows in padding), outside,
        distance, reached_sizes(scenario, clocks), stuck, work=servers.add_totals(),
        kv_uses=[(s.kv_use, s.pool) for each in loops if (s := each.server).policy.uses_block_pool],
        cache=servers.caches[0] if servers.caches else None, servers=servers.size, replicas=replicas,
        fleet=servers.metrics(), seconds_there=servers.seconds_there(),
        drafts=[d for each in loops if (d := each.server.drafts) is not None],
    )  # fmt: skip


def outside_profiles(
    scenario: Scenario, profile: Profile, servers: Servers, clocks: Sequence[SimulatedClock]
) -> tuple[list[str], float]:
    """Return which sizes of steps the profile of a server was not measured for, and how far outside they are."""
    pools = servers_of(scenario, profile)
    if not (isinstance(servers, Fleet) and len(profiles_of(scenario, profile)) > 1):
        return outside_profile(scenario, pools[0].profile, clocks)
    texts: list[str] = []
    first, distance = 0, 0.0
    for pool in pools:
        loops = [loop for replica in servers.replicas[first : first + pool.replicas] for loop in replica.loops]
        of_pool = [loop.clock for loop in loops if isinstance(loop.clock, SimulatedClock)]
        found, far = outside_profile(pool.scenario, pool.profile, of_pool)
        first, distance = first + pool.replicas, max(distance, far)
        texts += [f"{pool.name}: {text}" for text in found]
    return texts, distance


def outside_profile(scenario: Scenario, profile: Profile, clocks: Sequence[SimulatedClock]) -> tuple[list[str], float]:
    """Return the same for servers with one profile."""
    reached = reached_sizes(scenario, clocks)
    return profile.outside_range(reached), profile.distance_outside(reached)


def reached_sizes(scenario: Scenario, clocks: Sequence[SimulatedClock]) -> dict[str, float]:
    """Return the largest sizes of all steps."""
    largest = Shape(*map(max, *[clock.largest_shape for clock in clocks], Shape()))
    if largest.drafts:  # tokens of the layers, as those of prompts
        largest = largest._replace(prefill_tokens=max(largest.prefill_tokens, largest.decode_rows + largest.drafts))
    if scenario.engine.host_cache is not None:
        largest = largest._replace(swapped=0)  # the profile does not give the time of these copies
    return {**largest._asdict(), "context_per_row": max([clock.largest_row_context for clock in clocks])}


def measure(scenario: Scenario, requests: Sequence[Request], server: Server) -> Metrics:
    """Return the metrics of a finished run."""
    table = RunRequests.of(requests, scenario.engine.client_timeout)
    return Metrics(table, server.token_gaps, scenario.slo.seconds())

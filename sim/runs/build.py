"""Build the engine loops of a scenario: requests before a run, the server, its inbox and its simulated clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Optional

from servesim.config.memory import host_copy_times
from servesim.config.scenario import EngineConfig, Scenario
from servesim.config.speculative import Speculative
from servesim.config.user_code import user_errors
from servesim.core import BadInput, ClientRequest, Policy, Request, StepCost
from servesim.costs.derived import HostCopyCost
from servesim.costs.device_profile import Profile
from servesim.costs.drafting import with_drafter
from servesim.costs.profile import FRONT_END
from servesim.engine.acceptance import Chances
from servesim.engine.build import build_loop, build_server
from servesim.engine.clocks import Clock
from servesim.engine.loop import Loop
from servesim.engine.notices import Observer
from servesim.engine.rules import rules_of
from servesim.engine.server import Server
from servesim.engine.shape import Padding
from servesim.engine.simulated import SimulatedClock
from servesim.traces.trace import RequestTable, stream


def copy_requests(requests: Sequence[ClientRequest]) -> list[Request]:
    """Return new requests with the client's fields, in their state before a run."""
    if isinstance(requests, RequestTable):
        return requests.create(Request)
    return [Request(*request.client_fields()) for request in requests]


def build_scenario_loop(
    scenario: Scenario,
    requests: Iterable[Request],
    clock: Clock,
    observers: Sequence[Observer] = (),
    front_end: Sequence[float] = (),
    policy: Optional[Policy] = None,
) -> Loop:
    """Return the engine loop of a scenario; `front_end` is that of the profile, `policy` a new policy object."""
    engine = scenario.engine.model_dump()
    for key, seconds in zip(FRONT_END, front_end):
        if engine["front_end"][key] is None:
            engine["front_end"][key] = seconds
    policy = scenario.make_policy() if policy is None else policy
    with user_errors(policy):
        server = build_server(policy, engine)
        connect_drafts(server, scenario)
        return build_loop(server, engine, requests, clock, observers)


def connect_drafts(server: Server, scenario: Scenario) -> None:
    """Tell a server how many drafts its model accepts. Replicas draw from one stream: a request has its own luck."""
    section, drafts = scenario.drafts, server.drafts
    if section is None or drafts is None:
        if (section is None) != (drafts is None):
            raise BadInput(
                "speculative: expected the section if the policy object has num_speculative_tokens, and only then"
            )
        return
    drafts.connect(*chances_of(section, scenario.seed))


def chances_of(section: Speculative, seed: int) -> Chances:
    """Return the random streams and the rates of speculative decoding."""
    given = section.acceptance
    rate, rates = given if isinstance(given, float) else None, given if isinstance(given, list) else []
    return stream_key(seed, "acceptance"), rate, rates, stream_key(seed, "proposals"), section.proposals


def stream_key(seed: int, name: str) -> int:
    """Return the key of a random stream of the run."""
    return int(stream(seed, name).integers(2**63))


def build_simulation(
    scenario: Scenario,
    requests: Iterable[Request],
    observers: Sequence[Observer],
    hold: bool,
    profile: Profile,
    replica: int = 0,
) -> tuple[Loop, SimulatedClock]:
    """Return the loop of a scenario and its simulated clock. Each replica of a fleet has noise of its own."""
    policy, config = scenario.make_policy(), scenario.engine
    selected = profile.for_run(config.sampling)
    rules = rules_of(policy)
    if rules.steps_in_flight > rules.stages:
        selected = selected.overlapped()
    cost = selected.cost_of_run(scenario.seed + replica if scenario.noise else None, warm=config.start == "warm")
    cost = add_drafter(cost, scenario, profile)
    if config.host_cache is not None:
        cost = HostCopyCost(cost, *host_copy_times(config, scenario.profile))
    clock = SimulatedClock(
        cost,
        Padding(config.prefill_buckets, scenario.decode_buckets(policy)),
        hold,
        cold_start_seconds(config, profile),
    )
    return build_scenario_loop(scenario, requests, clock, observers, profile.front_end, policy), clock


def add_drafter(cost: StepCost, scenario: Scenario, profile: Profile) -> StepCost:
    """Return a cost model with the time of the drafter of a scenario, if it has one."""
    section = scenario.drafts
    if section is None:
        return cost
    return with_drafter(cost, profile, section.method, section.tokens, section.drafting, section.model or "")


def cold_start_seconds(config: EngineConfig, profile: Profile) -> tuple[float, float]:
    """Return the extra seconds of the first prefill and of the first decode."""
    if config.cold_start is not None:
        return config.cold_start.prefill, config.cold_start.decode
    if config.start == "warm":
        return 0.0, 0.0
    return profile.cold_start if config.start is None else profile.measured_cold_start()

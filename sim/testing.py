"""The policy contract and the router contract, as checks for your own policy or router.

    from servesim.testing import PolicyContract
    class TestMine(PolicyContract):
        policy = Mine(batch=8)

or call `check_policy(Mine(batch=8))` to run all checks; `check_router(MyRouter())` checks a router.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Optional

from servesim.core import DECIDE, BadInput, Plan, Policy, Request, StepCost, Stuck, View
from servesim.core.request import CLIENT_FIELDS, PROGRESS_FIELDS
from servesim.costs.linear import LinearCost
from servesim.engine.clocks import Clock, VirtualClock
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.engine.step import Step, batch
from servesim.routers import Asked, Fleet, Replica, Router
from servesim.runs.build import copy_requests

TIMES = attrgetter(
    "id", "outcome", "written", "preemptions", "scheduled", "first_token", "last_token", "finish", "client_end"
)
COST = LinearCost(base=0.01, prefill_token=0.001, decode_row=0.002, context=0.00001, swap_block=0.0005)


@dataclass(frozen=True)
class ContractWorld:
    """Requests and a small engine to check a policy on."""

    requests: Sequence[Request]
    blocks: int = 64
    block_size: int = 4
    host_blocks: int = 32
    max_model_len: Optional[int] = 96
    lag: int = 1
    end_lag: bool = False
    rejects: Optional[bool] = True  # reject oversized requests on arrival; None: as the policy's engine does
    cost: StepCost = field(default=COST)


def draw_requests(seed: int, count: int = 24) -> list[Request]:
    """Return random requests; some arrive at the same time."""
    rng = random.Random(seed)
    now = 0.0
    requests = []
    for id in range(count):
        now += rng.choice([0.0, 0.0, 0.01, 0.05, 0.3])
        output = rng.randint(1, 20)
        limit = output + rng.choice([0, 0, 5])
        requests.append(Request(id, now, rng.randint(1, 30), output, limit, priority=rng.randint(0, 2)))
    return requests


class Recorder:
    """Records every step, to compare two runs."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        self.steps.append((
            step.decided, step.start, step.kind, batch(server.running, step),
            [(r.id, how) for r, how, _ in step.preempted],
            [r.id for r in step.plan.moves.swap_in], [r.request.id for r in step.plan.moves.reject], server.pool.free,
            [r.id for r in server.waiting], [r.id for r in server.running], [r.id for r in server.swapped],
        ))  # fmt: skip

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        self.steps.append((now, [request.id for request in finished]))


@dataclass
class Outcome:
    """The state after a run."""

    requests: list[Request]
    server: Server
    calls: int
    stuck: Optional[str] = None

    def times(self) -> list[tuple[Any, ...]]:
        """Return the outcome and the times of every request."""
        return list(map(TIMES, self.requests))


def run_on(clock: Clock, policy: Policy, world: ContractWorld, observer: Any = None) -> Outcome:
    """Serve the requests of a world with a clock."""
    requests = copy_requests(world.requests)
    server = Server(policy, world.blocks, world.block_size, world.host_blocks, world.max_model_len)
    server.limits.change(None, world.rejects)
    observers = (observer,) if observer is not None else ()
    loop = Loop(server, Inbox(requests, world.lag, end_lag=world.end_lag), clock, observers, check=True)
    stuck = None
    try:
        loop.run()
    except (Stuck, BadInput) as error:  # livelocks, and worlds that are too small for the policy
        stuck = str(error)
    return Outcome(requests, server, loop.calls, stuck)


def simulated(policy: Policy, world: ContractWorld, hold: bool = True, observer: Any = None) -> Outcome:
    """Run on SimPy's clock."""
    return run_on(SimulatedClock(world.cost, hold=hold), policy, world, observer)


def run_live_loop(policy: Policy, world: ContractWorld, observer: Any = None) -> Outcome:
    """Run the loop of live runs, with step times from the cost model."""
    return run_on(VirtualClock(world.cost), policy, world, observer)


PUBLIC_FIELDS = (
    *CLIENT_FIELDS, *(name for name in PROGRESS_FIELDS if not name.startswith("_")), "written", "cached", "blocks",
)  # fmt: skip


def fields_of(request: Request) -> dict[str, Any]:
    """Return the values of a request that a policy can read."""
    return {name: getattr(request, name) for name in PUBLIC_FIELDS}


def snapshot(view: View) -> dict[str, Any]:
    """Return the content of a view, to compare before and after; the fields of request 7 are `request 7`."""
    pool, cohort = view.pool, view.cohort
    queues = (view.waiting, view.running, view.swapped, view.prefilling, view.finished)
    return {
        "the view": (
            view.now, view.state, pool.total, pool.free, pool.evictable, pool.host_free, cohort.size, cohort.steps,
            cohort.context,
            [[request.id for request in queue] for queue in queues],
        ),
        **{f"request {request.id}": fields_of(request) for queue in queues for request in queue},
    }  # fmt: skip


def check_unchanged(policy: Policy, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Check that a policy did not change the view or a request; the message names the field."""
    for what, old in before.items():
        new = after.get(what)
        if what != "the view" and new is not None and new != old:
            name = next(name for name in old if old[name] != new[name])
            raise AssertionError(f"{policy} changed {name} of {what} from {old[name]!r} to {new[name]!r}")
    assert before == after, f"{policy} changed the view"


@dataclass(frozen=True)
class ContractProbe(Policy):
    """Wraps a policy and calls it twice: the view must not change, and held plans must be repeated."""

    inner: Policy = field(default_factory=Policy)
    # The last plan with `hold`, and the step counter, the queues and the number of decoding requests at that time.
    held: list[Any] = field(default_factory=list)

    def rules(self) -> Any:
        return self.inner.rules()

    @property
    def uses_block_pool(self) -> bool:
        return self.inner.uses_block_pool

    @property
    def is_sorted(self) -> bool:
        return self.inner.is_sorted

    def initial_state(self) -> Any:
        return self.inner.initial_state()

    def held_state(self, state: Any, now: float) -> Any:
        return self.inner.held_state(state, now)

    def sort_key(self, request: Request) -> Any:
        before = {f"request {request.id}": fields_of(request)}
        key = self.inner.sort_key(request)
        check_unchanged(self.inner, before, {f"request {request.id}": fields_of(request)})
        return key

    def decide(self, view: View) -> Plan:
        """Call the policy twice and compare."""
        inner = self.inner
        before = snapshot(view)
        plan = inner.decide(view)
        assert isinstance(plan, Plan), f"{inner} returned {plan!r}, which is not a Plan"
        check_unchanged(inner, before, snapshot(view))
        second_plan = inner.decide(view)
        assert second_plan == plan, f"{inner} returned two different plans for the same view"
        check_unchanged(inner, before, snapshot(view))
        self._check_hold(view, plan)
        return plan

    def _check_hold(self, view: View, plan: Plan) -> None:
        """Check that a held plan is repeated until an event ends it."""
        inner = self.inner
        queues = tuple(tuple(queue) for queue in (view.waiting, view.running, view.swapped))
        if self.held:
            held, first_step, before, decoding = self.held
            steps = view.cohort.steps - first_step
            unfinished = tuple(tuple(r for r in queue if r.status != "done") for queue in before)
            same = queues == before and view.decoding == decoding  # a last token in flight ends a hold, too
            same = same or (held.hold.past_finish and queues == unfinished and view.decoding > 0)
            short = view.cohort.blocks_needed() + held.hold.keep_free > view.pool.free
            woken = held.hold.until is not None and view.now >= held.hold.until
            state = inner.held_state(view.state, view.now)
            ended = short or woken or state is DECIDE
            if same and 0 < steps <= held.hold.steps and not ended:
                moves = plan.moves
                assert plan.decode and not (
                    plan.chunks or moves.preempt or moves.admit or moves.swap_in or moves.reject
                ), f"{inner} held a plan for {held.hold.steps} steps and changed it after {steps}: {plan}"
                assert plan.state == state, f"{inner}: held_state() returns a wrong policy state"
                return
        is_held = plan.hold.steps and plan.decode and not plan.chunks
        self.held[:] = (plan, view.cohort.steps, queues, view.decoding) if is_held else ()


def check_held_plans(policy: Policy, world: ContractWorld) -> None:
    """Check that repeated plans give the same decisions and the same times as a call of the policy in every step."""
    decided, held = simulated(policy, world, hold=False), simulated(policy, world)
    message = f"{policy}: the result changes if the policy decides every step; is `hold` too large?"
    assert held.times() == decided.times(), message
    assert (held.calls, held.stuck) == (decided.calls, decided.stuck), message
    assert held.server.tokens_generated == decided.server.tokens_generated, message
    gaps = [outcome.server.token_gaps for outcome in (held, decided)]
    assert (gaps[0].seconds, gaps[0].counts) == (gaps[1].seconds, gaps[1].counts), message
    uses = [outcome.server.kv_use for outcome in (held, decided)]
    sums = [(use.tokens, use.block_sum, use.token_sum, use.peak_blocks) for use in uses]
    assert sums[0] == sums[1], message


def check_hold(policy: Policy, world: ContractWorld) -> None:
    """Check that a policy is deterministic and repeats held plans."""
    shared = {name: getattr(policy, name) for name in ("order", "group_width", "aging", "max_wait")}
    simulated(ContractProbe(inner=policy, **shared), world, hold=False)


def check_conservation(policy: Policy, world: ContractWorld) -> None:
    """Check that every request has an outcome, every token is generated once, and all blocks are free again."""
    outcome = simulated(policy, world)
    if outcome.stuck is not None:
        return
    server = outcome.server
    assert all(request.outcome is not None for request in outcome.requests), "a request was lost"
    finished = [request for request in outcome.requests if request.outcome == "finished"]
    assert all(request.written == request.stop_at for request in finished), "a token was lost or generated twice"
    assert server.tokens_generated == sum(request.written for request in outcome.requests), "a token was counted twice"
    for request in finished:
        times = (request.sent, request.visible_at, request.scheduled, request.first_token, request.finish)
        known = [time for time in times if time is not None]
        assert len(known) == len(times) and known == sorted(known), f"times of {request} are not in order: {times}"
    held = sum(request._blocks for request in server.finished)
    assert server.pool.held == held, "blocks were lost"
    assert server.pool.host_free + server.pool.host_lost == server.pool.host_total, "host blocks were lost"


def check_service(policy: Policy) -> None:
    """Check that a policy serves one short request alone in an empty server; in a full one it may get stuck."""
    outcome = simulated(policy, ContractWorld([Request(0, 0.0, 8, 4)]))
    served = outcome.requests[0].outcome == "finished"
    assert served, f"{policy} does not serve a single short request: {outcome.stuck or outcome.requests[0].reason}"


def check_live_matches_simulated(policy: Policy, world: ContractWorld) -> None:
    """Check that the simulator and the live loop make the same decisions, also for simultaneous events."""
    simulated_log, live_log = Recorder(), Recorder()
    simulation, live = simulated(policy, world, observer=simulated_log), run_live_loop(policy, world, live_log)
    message = f"{policy} makes different decisions live and in simulation"
    assert simulated_log.steps == live_log.steps, message
    assert simulation.times() == live.times(), message
    assert simulation.stuck == live.stuck, message


def check_policy(policy: Policy, seed: int = 0, **changes: Any) -> None:
    """Check the whole policy contract on random requests."""
    world = ContractWorld(draw_requests(seed), **changes)
    check_service(policy)
    for check in (check_hold, check_held_plans, check_conservation, check_live_matches_simulated):
        check(policy, world)


def check_router(router: Router, seed: int = 0) -> None:
    """Check the router contract on random requests: one, two and four replicas, of which one may be absent."""
    for replicas in (1, 2, 4):
        chosen = drive(router, replicas, seed, choose)
        assert drive(router, replicas, seed) == chosen, f"{router} chooses differently the second time"
        if not router.reads_first_tokens:
            same = drive(router, replicas, seed, first_tokens=False) == chosen
            assert same, f"{router} depends on first tokens, expected reads_first_tokens to return True"
        if not router.learns:
            same = drive(router, replicas, seed, first_tokens=False, others=False) == chosen
            assert same, f"{router} depends on what the replicas do, expected learns to return True"


def route(router: Router, request: Asked, fleet: Fleet, seed: int) -> int:
    return router.route(request, fleet, random.Random(seed))


def drive(
    router: Router, replicas: int, seed: int, ask: Any = route, first_tokens: bool = True, others: bool = True
) -> list[int]:
    """Ask a router for random requests. Without `others` it hears of no ends and reports. Return its choices."""
    rng, memory = random.Random(seed), router.memory(replicas)
    chosen: list[int] = []
    open_requests: list[tuple[Asked, int]] = []
    for number in range(40):
        present = sorted(rng.sample(range(replicas), max(1, replicas - rng.randint(0, 1))))
        pieces = [(rng.randint(1, 3), 4 * rng.randint(0, 90)), (100 + number, 4 * rng.randint(1, 40))]
        tokens = sum(length for _, length in pieces) // 4
        request = Asked(number, None, tokens, rng.choice([None, "a", "b", "c"]), 4 * tokens + 300, pieces)
        cached = [rng.randint(0, tokens) for _ in range(replicas)]
        fleet = Fleet(0.1 * number, present, memory, cached.__getitem__)
        replica = ask(router, request, fleet, seed + number)
        chosen.append(replica)
        router.sent(request, replica, fleet)
        open_requests.append((request, replica))
        if first_tokens:
            router.prefilled(memory, request, replica)
        said = [Replica(rng.randint(0, 3), rng.randint(0, 9), rng.random()) for _ in range(replicas)]
        ended = open_requests.pop(rng.randrange(len(open_requests))) if rng.random() < 0.5 else None
        if others:
            router.reported(memory, said)
        if others and ended is not None:
            router.ended(memory, *ended)
    return chosen


def choose(router: Router, request: Asked, fleet: Fleet, seed: int) -> int:
    """Return the choice of a router for a request, and check it."""
    before, present = contents(fleet.memory), list(fleet.present)
    choices, again = list(router.choices(request, fleet)), list(router.choices(request, fleet))
    assert again == choices, f"{router} returned two different choices for the same request: {choices} and {again}"
    assert set(choices) <= set(present) and choices, f"{router} chose {choices}, expected some of {present}"
    replica = route(router, request, fleet, seed)
    assert replica in choices, f"{router}: route returned {replica!r}, choices {choices}"
    assert contents(fleet.memory) == before, f"{router} changed its memory in a choice, expected that only `sent` does"
    return replica


def contents(value: Any) -> Any:
    """Return the values of an object and of those inside it, to compare before and after."""
    if isinstance(value, dict):
        return [(contents(key), contents(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return type(value).__name__, [contents(inner) for inner in value]
    if value is None or isinstance(value, (int, float, str, bytes)) or callable(value):
        return value
    names = {name for kind in type(value).__mro__ for name, what in vars(kind).items() if hasattr(what, "__set__")}
    names.update(vars(value) if hasattr(value, "__dict__") else ())
    inside = sorted(
        name for name in names if name not in ("__dict__", "__weakref__", "parent") and hasattr(value, name)
    )
    return type(value).__name__, [(name, contents(getattr(value, name))) for name in inside]


class PolicyContract:
    """Base class of a test: set `policy`, and pytest checks the contract."""

    policy: Policy
    seeds: Sequence[int] = range(8)

    def _check(self, check: Callable[[Policy, ContractWorld], None]) -> None:
        for seed in self.seeds:
            check(self.policy, ContractWorld(draw_requests(seed), lag=1 + seed % 3, end_lag=seed % 2 == 1))

    def test_serves_a_single_request(self) -> None:
        check_service(self.policy)

    def test_held_plans_give_the_same_result(self) -> None:
        self._check(check_held_plans)

    def test_deterministic_and_hold_respected(self) -> None:
        self._check(check_hold)

    def test_no_request_token_or_block_is_lost(self) -> None:
        self._check(check_conservation)

    def test_live_decisions_match_the_simulation(self) -> None:
        self._check(check_live_matches_simulated)

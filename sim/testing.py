"""The contract every policy keeps, as checks that anyone's policy can be put through.

    from servesim.testing import PolicyContract
    class TestMine(PolicyContract):
        policy = Mine(batch=8)

or `check_policy(Mine(batch=8))` for all of it at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from servesim.core import BadInput, Plan, Policy, Request, StepCost, Stuck, Traits, View, traits_of
from servesim.costs.linear import LinearCost
from servesim.engine.clocks import Clock, VirtualClock
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.engine.step import Step, batch
from servesim.runs.simulate import fresh

COST = LinearCost(base=0.01, prefill_token=0.001, decode_row=0.002, context=0.00001, swap_block=0.0005)


@dataclass(frozen=True)
class Setting:
    """A small world to run a policy in."""

    requests: Sequence[Request]
    blocks: int = 64
    block_size: int = 4
    host_blocks: int = 32
    max_model_len: Optional[int] = 96
    lag: int = 1
    end_lag: bool = False
    refuses: Optional[bool] = True
    cost: StepCost = field(default=COST)


def some_requests(seed: int, count: int = 24) -> list[Request]:
    """Return random requests, some of which arrive at the same instant."""
    chance = random.Random(seed)
    now = 0.0
    requests = []
    for id in range(count):
        now += chance.choice([0.0, 0.0, 0.01, 0.05, 0.3])
        output = chance.randint(1, 20)
        limit = output + chance.choice([0, 0, 5])
        requests.append(Request(id, now, chance.randint(1, 30), output, limit, priority=chance.randint(0, 2)))
    return requests


class Recorder:
    """Notes every turn, so that two runs can be compared."""

    def __init__(self) -> None:
        self.turns: list[tuple[Any, ...]] = []

    def begun(self, server: Server, step: Step, arrived: list[Request]) -> None:
        self.turns.append((
            step.start, step.kind, batch(server.running, step), [(r.id, how) for r, how, _ in step.evicted],
            [r.id for r in step.plan.moves.swap_in], [r.request.id for r in step.plan.moves.reject], server.pool.free,
            [r.id for r in server.waiting], [r.id for r in server.running], [r.id for r in server.swapped],
        ))  # fmt: skip

    def ended(self, server: Server, step: Step, now: float, over: list[Request]) -> None:
        self.turns.append((now, [request.id for request in over]))


@dataclass
class Outcome:
    """What a run left behind."""

    requests: list[Request]
    server: Server
    calls: int
    stuck: Optional[str] = None

    def times(self) -> list[tuple[Any, ...]]:
        """Return what happened to every request."""
        return [
            (r.id, r.outcome, r.written, r.evictions, r.scheduled, r.first_token, r.last_token, r.finish, r.seen)
            for r in self.requests
        ]


def run_on(clock: Clock, policy: Policy, setting: Setting, observer: Any = None) -> Outcome:
    """Serve a setting's requests with a clock."""
    requests = fresh(setting.requests)
    server = Server(
        policy, setting.blocks, setting.block_size, setting.host_blocks, setting.max_model_len,
        refuses=setting.refuses,
    )  # fmt: skip
    observers = (observer,) if observer is not None else ()
    loop = Loop(server, Inbox(requests, setting.lag), clock, observers, setting.end_lag, check=True)
    stuck = None
    try:
        loop.run()
    except (Stuck, BadInput) as found:  # livelocks, and worlds too small for the policy to run in
        stuck = str(found)
    return Outcome(requests, server, loop.calls, stuck)


def simulated(policy: Policy, setting: Setting, leaps: bool = True, observer: Any = None) -> Outcome:
    """Run on SimPy's clock."""
    return run_on(SimulatedClock(setting.cost, leaps=leaps), policy, setting, observer)


def lived(policy: Policy, setting: Setting, observer: Any = None) -> Outcome:
    """Run as on a device that takes exactly what the cost model says."""
    return run_on(VirtualClock(setting.cost), policy, setting, observer)


def snapshot(view: View) -> tuple[Any, ...]:
    """Return all that a view shows, to compare before and after."""
    queues = (view.waiting, view.running, view.swapped, view.prefilling, view.finished)
    return (
        view.now, view.memory, view.pool.free, view.pool.host_free, view.cohort.ticks, view.cohort.context,
        [[(r.id, r.written, r.cached, r.blocks, r.place, r.slot) for r in queue] for queue in queues],
    )  # fmt: skip


@dataclass(frozen=True)
class Pure(Policy):
    """Wraps a policy and asks it twice: nothing may change, and held plans must come again."""

    inner: Policy = field(default_factory=Policy)
    held: list[Any] = field(default_factory=list)  # the last plan with `hold`, and what was there then

    @property
    def traits(self) -> Traits:
        return traits_of(self.inner)

    @property
    def paged(self) -> bool:
        return self.inner.paged

    @property
    def ranked(self) -> bool:
        return self.inner.ranked

    def begin(self) -> Any:
        return self.inner.begin()

    def leap(self, memory: Any, iterations: int) -> Any:
        return self.inner.leap(memory, iterations)

    def rank(self, request: Request) -> Any:
        return self.inner.rank(request)

    def decide(self, view: View) -> Plan:
        """Decide twice and compare."""
        inner = self.inner
        before = snapshot(view)
        plan = inner.decide(view)
        assert isinstance(plan, Plan), f"{inner} decided {plan!r}, which is no Plan"
        assert snapshot(view) == before, f"{inner} changed what it was shown"
        again = inner.decide(view)
        assert again == plan, f"{inner} gave two plans for one view"
        assert snapshot(view) == before, f"{inner} changed what it was shown"
        self._keep_word(view, plan)
        return plan

    def _keep_word(self, view: View, plan: Plan) -> None:
        """A held plan must be given again until something happens."""
        inner = self.inner
        people = tuple(tuple(queue) for queue in (view.waiting, view.running, view.swapped))
        if self.held:
            promised, ticks, then = self.held
            further = view.cohort.ticks - ticks
            gone = tuple(tuple(r for r in queue if r.place != "done") for queue in then)
            same = people == then or (promised.lasts and people == gone and people[1])
            short = view.cohort.need() + promised.spare > view.pool.free
            woken = promised.wake is not None and view.now >= promised.wake
            if same and 0 < further <= promised.hold and not short and not woken:
                moves = plan.moves
                assert plan.decode and not (
                    plan.chunks or moves.evict or moves.admit or moves.swap_in or moves.reject
                ), f"{inner} held a plan for {promised.hold} iterations and changed it after {further}: {plan}"
                assert plan.memory == inner.leap(promised.memory, further), f"{inner}: leap() of its memory is off"
                return
        self.held[:] = (plan, view.cohort.ticks, people) if plan.hold and plan.decode and not plan.chunks else ()


def check_leaps(policy: Policy, setting: Setting) -> None:
    """Leaps on and off give the same decisions and the same times."""
    single, leapt = simulated(policy, setting, leaps=False), simulated(policy, setting, leaps=True)
    told = f"{policy}: deciding every iteration anew gives another result; does `hold` promise too much?"
    assert leapt.times() == single.times(), told
    assert (leapt.calls, leapt.stuck, leapt.server.written) == (single.calls, single.stuck, single.server.written), told
    assert leapt.server.gaps.total == single.server.gaps.total, told


def check_word(policy: Policy, setting: Setting) -> None:
    """It is pure, and what it holds it keeps."""
    shared = {name: getattr(policy, name) for name in ("order", "group_width", "aging", "max_wait")}
    simulated(Pure(inner=policy, **shared), setting, leaps=False)


def check_conservation(policy: Policy, setting: Setting) -> None:
    """Nothing is lost: every request has an outcome, every token is written once, all blocks are back."""
    outcome = simulated(policy, setting)
    if outcome.stuck is not None:
        return
    server = outcome.server
    assert all(request.outcome is not None for request in outcome.requests), "a request was lost"
    finished = [request for request in outcome.requests if request.outcome == "finished"]
    assert all(request.written == request.end for request in finished), "a token was lost or written twice"
    assert server.written == sum(request.written for request in outcome.requests), "a token was counted twice"
    for request in finished:
        instants = (request.arrival, request.visible, request.scheduled, request.first_token, request.finish)
        known = [instant for instant in instants if instant is not None]
        assert len(known) == len(instants) and known == sorted(known), f"time ran back for {request}: {instants}"
    held = sum(request._held for request in server.finished)
    assert server.pool.free + held == server.pool.total, "blocks were lost"
    assert server.pool.host_free == server.pool.host_total, "blocks of the host were lost"


def check_two_clocks(policy: Policy, setting: Setting) -> None:
    """The simulator and a live driver on a fake device decide identically, ties included."""
    ours, theirs = Recorder(), Recorder()
    one, two = simulated(policy, setting, observer=ours), lived(policy, setting, observer=theirs)
    told = f"{policy} decides otherwise on the wall clock than in simulation"
    assert ours.turns == theirs.turns, told
    assert one.times() == two.times(), told
    assert one.stuck == two.stuck, told


def check_policy(policy: Policy, seed: int = 0, **changes: Any) -> None:
    """Put a policy through the whole contract on random requests."""
    setting = Setting(some_requests(seed), **changes)
    for check in (check_word, check_leaps, check_conservation, check_two_clocks):
        check(policy, setting)


class PolicyContract:
    """Inherit, set `policy`, and pytest runs the contract."""

    policy: Policy
    seeds: Sequence[int] = range(8)

    def _settings(self) -> list[Setting]:
        return [Setting(some_requests(seed), lag=1 + seed % 3, end_lag=seed % 2 == 1) for seed in self.seeds]

    def test_leaps_change_nothing(self) -> None:
        for setting in self._settings():
            check_leaps(self.policy, setting)

    def test_it_is_pure_and_keeps_what_it_holds(self) -> None:
        for setting in self._settings():
            check_word(self.policy, setting)

    def test_nothing_is_lost(self) -> None:
        for setting in self._settings():
            check_conservation(self.policy, setting)

    def test_both_clocks_decide_alike(self) -> None:
        for setting in self._settings():
            check_two_clocks(self.policy, setting)

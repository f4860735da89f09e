"""How many replicas hold a load, and which router: the part of `sim recommend` for more than one device.

What one replica serves at overload is the lower limit of the search: fewer replicas cannot serve all requests. Its
highest load within the limits gives the first number to try. Larger fleets share their load better, so often fewer
replicas are enough. Each number is a sweep over the routers, and over pools that run prefill and decode apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Optional

from servesim.config.layers import Tree, apply_assignment
from servesim.config.scenario import scenario_from
from servesim.core import Shape
from servesim.core.limits import MAX_RANKS
from servesim.costs.device_profile import load_profile
from servesim.costs.model_arithmetic import model_of
from servesim.runs.request_rate import longer_scenario
from servesim.runs.simulate import load_trace
from servesim.traces.trace import has_field

from .pilot_runs import MAX_REQUESTS
from .ranking import Row, Summary
from .rates import Curve

SIMPLE_ROUTERS = ("round-robin", "least-requests")
PREFIX_ROUTERS = {"vllm": "llm-d", "vllm-ascend": "llm-d", "sglang": "sglang-cache-aware"}  # of an engine
ROUTER, POOLS = "cluster.router", "cluster.pools"
TURNOVER = 10  # requests of a run / requests in the fleet at the same time
MORE_REPLICAS = 2.0  # times the first number: no fleet above it is tried
Sweep = Callable[[str, Sequence[Tree], Tree], Summary]  # name, grids of parameters, base scenario


@dataclass(frozen=True)
class Fleet:
    """The answer: replicas behind a router."""

    replicas: int
    rows: Sequence[Row]  # the routers, then prefill and decode apart
    best: Row
    base: Tree  # the scenario of these replicas
    holds: bool  # the best row meets the limits
    fewer: Optional[Row] = None  # the best row with one replica less

    @property
    def router(self) -> str:
        """The name of the best router; apart, that of both pools."""
        return str(self.best.assignment.get(ROUTER) or self.base["cluster"]["router"])

    @property
    def pools(self) -> Sequence[Tree]:
        """Prefill and decode, if they are apart."""
        pools: Sequence[Tree] = self.best.assignment.get(POOLS, ())
        return pools

    @property
    def scenario(self) -> Tree:
        """The scenario with the best router."""
        return apply_assignment(self.base, self.best.assignment)


@dataclass
class FleetSearch:
    """Finds the smallest fleet that holds a load."""

    base: Tree  # of one replica with the recommended settings, at the rate of the question
    rate: float  # requests per second
    one: Row  # this replica at this rate
    curve: Optional[Curve]  # of this replica
    routers: Sequence[str]
    sweep: Sweep
    found: dict[int, Summary] = field(default_factory=dict)  # by the number of replicas

    @property
    def first(self) -> Optional[int]:
        """The replicas that one replica's highest load asks for; None if it meets the limits at no load."""
        capacity = self.throughput if self.curve is None or self.curve.capacity is None else self.curve.capacity.rate
        return math.ceil(self.rate / capacity) if capacity else None

    @property
    def throughput(self) -> float:
        """The most requests per second that one replica has served."""
        points = () if self.curve is None else self.curve.points
        return max([self.one.mean("request_throughput"), *(p.row.mean("request_throughput") for p in points)])

    def smallest(self) -> Optional[Fleet]:
        """Return the smallest fleet that holds the load, or the largest one that was tried; None if no fleet helps."""
        if self.first is None or self.first > MAX_RANKS:
            return None
        low, high = max(1, math.ceil(self.rate / self.throughput) - 1), max(2, self.first)
        low, limit = min(low, high - 1), min(MAX_RANKS, math.ceil(MORE_REPLICAS * high))
        while not self.holds(high):
            if high >= limit:
                return self.fleet(high)
            low, high = high, high + 1
        # `high` replicas hold the load. `low` do not, or were not tried.
        while high - low > 1 or (low > 1 and low not in self.found):
            middle = max(low, (low + high) // 2)
            if not self.holds(middle):
                low = middle
            else:
                high, low = middle, low if low < middle else middle - 1
        return self.fleet(high)

    def holds(self, replicas: int) -> bool:
        """Run the routers with some replicas. Return whether one of them meets the limits."""
        return winner_of(self.summary(replicas)) is not None

    def summary(self, replicas: int) -> Summary:
        """Return the sweep over the routers with some replicas."""
        if replicas not in self.found:
            grids: list[Tree] = [{ROUTER: list(self.routers)}, {POOLS: self.splits(replicas)}]
            base = self.scenario_of(replicas)
            self.found[replicas] = self.sweep(f"fleet-{replicas}", [grid for grid in grids if all(grid.values())], base)
        return self.found[replicas]

    def splits(self, replicas: int) -> list[list[Tree]]:
        """Return pools for prefill and decode: as one replica divides its time between them, and the next splits."""
        profile = load_profile(self.base["profile"])
        if model_of(profile.about) is None:  # the size of a copy is not known
            return []
        prompt = self.one.mean("prompt_tokens_computed") / self.one.mean("completed")
        share = self.throughput * profile.cost.seconds(Shape(1, round(prompt), round(prompt), round(prompt**2)))
        middle = min(replicas - 1, max(1, round(replicas * share)))
        sizes = [number for number in range(middle - 1, middle + 2) if 0 < number < replicas]
        return [[pool("prefill", number), pool("decode", replicas - number)] for number in sizes]

    def scenario_of(self, replicas: int) -> Tree:
        """Return the fleet with the first router. Runs are long enough for a backlog to show."""
        tree = apply_assignment(self.base, {"cluster.replicas": replicas, ROUTER: self.routers[0]})
        requests = self.one.mean("completed") + self.one.mean("failed")
        needed = min(MAX_REQUESTS, TURNOVER * self.rate * self.seconds)
        return longer_scenario(tree, max(1, math.ceil(needed / requests)))

    @property
    def seconds(self) -> float:
        """The mean seconds of a request in a replica at its highest load; without limits, at overload."""
        good = [] if self.curve is None else [point.row for point in self.curve.points if point.good]
        if good:
            return good[-1].mean("mean_e2el_ms") / 1e3
        states = self.one.time_breakdown()
        return sum(states.values()) - states.get("queued", 0.0) - states.get("front_end", 0.0)

    def fleet(self, replicas: int) -> Fleet:
        """Return the answer for some replicas."""
        summary, fewer = self.summary(replicas), self.found.get(replicas - 1)
        best = winner_of(summary)
        rows = sorted(summary.rows, key=lambda row: row.config)
        return Fleet(
            replicas, rows, summary.rows[0] if best is None else best, self.scenario_of(replicas), best is not None,
            None if fewer is None else fewer.rows[0],
        )  # fmt: skip


def winner_of(summary: Summary) -> Optional[Row]:
    """Return the best router that meets the limits and has no growing backlog."""
    return next((row for row in summary.rows if row.eligible and not row.is_saturated), None)


def pool(role: str, replicas: int) -> Tree:
    """Return a pool of one role."""
    return {"name": role, "role": role, "replicas": replicas}


def name_of(row: Row) -> str:
    """Return the router of a row, or its pools: `1 prefill + 2 decode`."""
    pools = row.assignment.get(POOLS)
    return " + ".join(f"{pool['replicas']} {pool['name']}" for pool in pools) if pools else str(row.assignment[ROUTER])


def routers_for(server: str, base: Tree, chosen: Sequence[str]) -> list[str]:
    """Return the routers to compare: the chosen ones, or simple ones and, for shared prefixes, one that knows them."""
    known = PREFIX_ROUTERS.get(server)
    if chosen or known is None:
        return list(dict.fromkeys(chosen or SIMPLE_ROUTERS))
    shared = has_field(load_trace(scenario_from(base)).requests, "content")
    return [*SIMPLE_ROUTERS, *([known] if shared else [])]

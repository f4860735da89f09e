"""What limits a run, in one word and in one sentence that names the setting to change.

A run is limited by what its first waiting request lacks (engine/waits.py), if one waits in a twentieth of the time. But
if a step of twice the size takes twice as long, more slots, tokens or blocks do not help: the device limits the
run. Without a queue, the device limits it if it is always busy and tokens take much longer than those of one request
alone. The front end limits a run if it takes more than half of the TTFT. In a fleet, shares of the time are means over
its replicas, and the sentence ends with the busiest one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Optional, Protocol

from servesim.config.scenario import Scenario
from servesim.core import Request, Shape
from servesim.costs.device_profile import Profile
from servesim.engine.server import Server
from servesim.engine.work_totals import KindTotals

from .build import add_drafter
from .metrics import Metrics
from .pools import profile_for
from .replicas import Replicas
from .request_rows import sum_in_order
from .steady_state import is_saturated

Kind = Literal["slots", "budget", "blocks", "compute", "front end", "none"]
MIN_WAITING = 0.05  # share of the time with a request that waits; below it, the queue counts as empty
MIN_BUSY = 0.95  # share of the time in model calls of a device that limits a run without a queue
SLOW = 1.5  # time per token of a busy device, relative to that of one request alone
PROPORTIONAL = 0.95  # twice the work takes at least this part of twice the time: larger steps do not help
FRONT_END = 0.5  # share of the TTFT


class Run(Protocol):
    """What is used of a simulated run."""

    scenario: Scenario
    profile: Profile
    requests: Sequence[Request]
    measures: Metrics
    server: Server
    busy_seconds: float
    end: float
    work: Mapping[str, KindTotals]
    replicas: Optional[Replicas]


class Limit(NamedTuple):
    """What limits a run."""

    kind: Kind
    text: str
    saturated: bool  # requests arrive faster than they finish


class Shares(NamedTuple):
    """The parts of the time of a run from which its limit follows."""

    slots: float  # in which the first waiting request lacked a slot, and so on
    budget: float
    blocks: float
    busy: float  # in model calls
    front_end: float  # mean seconds until the scheduler sees a request
    ttft: float  # mean seconds

    @property
    def waiting(self) -> float:
        """The share of the time in which a request lacked something."""
        return self.slots + self.budget + self.blocks


def limit_of(run: Run) -> Limit:
    """Return what limits a simulated run."""
    saturated, shares = is_saturated(run.requests), shares_of(run)
    kind = kind_of(run, shares, saturated)
    text = text_of(run, shares, kind)
    if saturated:
        text = f"more load than it can serve, requests arrive faster than they finish; {text}"
    if run.replicas is not None:
        busiest = run.replicas.busiest
        share = f"{busiest['name']} is the busiest: {100 * busiest['busy']:.0f} % of the time in model calls"
        text += f" (means over {len(run.replicas.rows)} replicas; {share})"
    return Limit(kind, text[0].upper() + text[1:], saturated)


def shares_of(run: Run) -> Shares:
    """Return the parts of the time of a run."""
    waits, done, table = run.server.waits.metrics(run.end), run.measures.done, run.measures.requests
    return Shares(
        waits["waiting_slots"],
        waits["waiting_budget"],
        waits["waiting_blocks"],
        run.busy_seconds / run.end if run.end else 0.0,
        sum_in_order((table.column("visible_at") - table.column("sent"))[done]) / max(1, len(done)),
        float(run.measures.ttft.mean()) if len(done) else 0.0,
    )


def kind_of(run: Run, shares: Shares, saturated: bool) -> Kind:
    """Return what limits a run."""
    if shares.front_end > FRONT_END * shares.ttft:
        return "front end"
    if shares.waiting >= MIN_WAITING or (saturated and shares.waiting):
        lacks: tuple[Kind, ...] = ("slots", "budget", "blocks")
        lack = max(lacks, key=lambda kind: float(getattr(shares, kind)))
        return lack if larger_steps_help(run, lack == "budget") else "compute"
    return "compute" if saturated or (shares.busy >= MIN_BUSY and slowdown(run) >= SLOW) else "none"


def slowdown(run: Run) -> float:
    """Return the mean TPOT relative to the decode step of one request of mean length; 1 if there is no TPOT."""
    measures = run.measures
    if not len(measures.tpot):
        return 1.0
    context = (measures.inputs + measures.outputs // 2) // len(measures.done)
    rows = sum(totals.decode_rows for totals in run.work.values())
    drafts, tokens = sum(totals.draft_tokens for totals in run.work.values()), 1.0
    if drafts:  # a step returns several tokens
        drafts, tokens = round(drafts / rows), max(1.0, (measures.outputs - len(measures.done)) / rows)
    step = Shape(decode_rows=1, decode_live=1, context=context, drafts=drafts)
    profile = profile_for(run.scenario, run.profile, "decode")
    alone = add_drafter(profile.cost, run.scenario, profile).duration(step) / tokens
    return float(measures.tpot.mean()) / alone if alone > 0 else 1.0


def larger_steps_help(run: Run, prompts: bool) -> bool:
    """Whether one step with the work of two takes less time than both: of steps with prompts, or of decodes."""
    work, budget = KindTotals(), run.server.rules.token_budget(run.server.policy)
    for kind in ("prefill", "mixed") if prompts else ("decode",):
        work.add(run.work[kind])
    if not work.steps:
        work.add(run.work["mixed"])
    if not work.steps:
        return True
    steps = float(work.steps)
    if prompts and budget is not None:
        steps = min(steps, work.tokens / budget)  # as if every step used the whole budget
    cost = profile_for(run.scenario, run.profile, "prefill" if prompts else "decode").cost
    once, twice = (cost.seconds(mean_shape(work, steps / factor)) for factor in (1, 2))
    return twice < PROPORTIONAL * 2 * once


def mean_shape(work: KindTotals, steps: float) -> Shape:
    """Return the shape of a step if the work were divided into this number of equal steps."""
    prompts, chunk = work.prompts / steps, work.prompt_tokens / max(1, work.prompts)
    cached, rows = work.prompt_cached / max(1, work.prompts), work.decode_rows / steps
    tokens, context = prompts * chunk, (work.decode_pairs - work.decode_rows) / steps
    sizes = (prompts, tokens, tokens, tokens * chunk, tokens * cached, rows, rows, context)
    return Shape(*map(round, sizes))._replace(drafts=round(work.draft_tokens / steps))


def text_of(run: Run, shares: Shares, kind: Kind) -> str:
    """Return what limits a run in a sentence, with the setting that moves this limit."""
    busy = f"{100 * shares.busy:.0f} %"
    if kind == "none":
        waiting = f"requests wait for the scheduler in {100 * shares.waiting:.0f} % of the time"
        return f"nothing limits this run: {waiting}; model calls run in {busy}"
    if kind == "front end":
        return (
            f"the front end limits this run: {1e3 * shares.front_end:.0f} of {1e3 * shares.ttft:.0f} ms of the mean "
            "TTFT pass before the scheduler sees a request; engine.front_end has its times"
        )
    if kind == "compute":
        why = f"a token takes {slowdown(run):.1f} times as long as one of a request alone"
        if shares.waiting >= MIN_WAITING:
            why = "larger steps would take longer in proportion"
        more = "more devices" if run.replicas is None else "more replicas"
        return (
            f"the device limits this run: model calls run in {busy} of the time, and {why}; "
            f"no setting of the scheduler moves this limit, but {more} do"
        )
    limits, lacked = {
        "slots": ("slots limit", "a slot"),
        "budget": ("the budget of a step limits", "a place in the step"),
        "blocks": ("KV blocks limit", "KV blocks"),
    }[kind]
    advice = f"; a larger {settings} moves this limit" if (settings := settings_of(run, kind)) else ""
    share = f"{100 * float(getattr(shares, kind)):.0f} %"
    return f"{limits} this run: a request waited for {lacked} in {share} of the time{advice}"


def settings_of(run: Run, kind: str) -> str:
    """Return the settings that move a limit, with their values."""
    engine, server = run.scenario.engine, run.server
    if kind == "blocks":
        memory = "engine.gpu_memory_utilization or engine.device_memory"
        return f"engine.num_blocks ({engine.num_blocks})" if engine.device_memory is None else memory
    names = (server.rules.slots_field,) if kind == "slots" else server.rules.budget_fields
    values = {name: server.rules.setting(server.policy, name) for name in names}
    return " or ".join(f"policy.{name} ({value})" for name, value in values.items() if value is not None)

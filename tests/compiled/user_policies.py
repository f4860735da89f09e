"""Policies as users write them in Python, good and bad, to run with the compiled engine and with the plain one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

import numpy as np
from servesim.core import FOREVER, Chunk, Hold, Plan, Policy, Request, View
from servesim.engine.rules import EngineRules
from servesim.policies.vllm_v1.policy import VLLMV1
from servesim.policies.vllm_v1.rules import VLLMRules
from servesim.policies.vllm_v1.step_pass import Pass


def prompts(view: View, batch: int) -> list[Chunk]:
    """Return the prompts that fit into the batch and into the KV blocks."""
    free, chunks = view.pool.free, []
    for request in view.waiting:
        blocks = view.pool.blocks_for(request.prompt + request.limit)
        if blocks > free or len(view.running) + len(chunks) >= batch:
            break
        free -= blocks
        chunks.append(Chunk(request, request.pending, blocks))
    return chunks


@dataclass(frozen=True)
class FillBatch(Policy):
    """Fill the batch in the order of the waiting queue."""

    batch: int = 4  # maximum running requests

    def decide(self, view: View) -> Plan:
        chunks = prompts(view, self.batch)
        return Plan(chunks=chunks) if chunks else Plan(decode=view.decoding > 0, hold=FOREVER)


@dataclass(frozen=True)
class NewDefaults(FillBatch):
    """Gives other defaults to fields of Policy and of its base."""

    order: str = "shortest-prompt"
    max_wait: Optional[float] = 2
    batch: int = 3


@dataclass(frozen=True)
class NewDefaultsByField(FillBatch):
    """Gives other defaults with `field`."""

    order: str = field(default="longest-prompt", metadata={"unit": "none"})
    max_wait: Optional[float] = field(default_factory=lambda: 0.5)


@dataclass(frozen=True, slots=True)
class Slots(FillBatch):
    """Has slots."""

    order: str = "shortest-output"
    more: int = 1


class OwnInit(Policy):
    """No dataclass; its constructor does not call that of Policy."""

    def __init__(self, batch: int = 3) -> None:
        object.__setattr__(self, "batch", batch)

    batch: int

    def decide(self, view: View) -> Plan:
        chunks = prompts(view, self.batch)
        return Plan(chunks=chunks) if chunks else Plan(decode=view.decoding > 0)


@dataclass(frozen=True)
class NumpyCounts(FillBatch):
    """Computes with numpy."""

    def decide(self, view: View) -> Plan:
        chunks = [Chunk(c.request, np.int64(c.tokens), np.int32(c.blocks)) for c in prompts(view, self.batch)]
        if chunks:
            return Plan(chunks=chunks)
        wake_at = np.float64(view.now) + 100
        hold = Hold(np.int64(3), until=wake_at if view.waiting else None)
        return Plan(decode=np.bool_(view.decoding > 0), hold=hold)


@dataclass(frozen=True)
class NumberForBool(FillBatch):
    """Gives numbers where the engine expects true or false."""

    def decide(self, view: View) -> Plan:
        chunks = prompts(view, self.batch)
        return Plan(chunks=chunks, decode=0 if chunks else view.decoding, hold=Hold(True, past_finish=1))


@dataclass(frozen=True)
class OwnState(FillBatch):
    """Counts its decode steps in the policy state."""

    def initial_state(self) -> Any:
        return 0

    def held_state(self, state: Any, now: float) -> Any:
        return state + 1

    def decide(self, view: View) -> Plan:
        plan = super().decide(view)
        return plan._replace(state=view.state + plan.decode)


class PlainClass(FillBatch):
    """No dataclass of its own, with rules of its own."""

    def rules(self) -> EngineRules:
        rules = EngineRules()
        rules.running_order, rules.reserved_blocks = "slot", 2
        return rules


@dataclass(frozen=True)
class ShortestFirst(FillBatch):
    """Sorts by a key of its own."""

    @property
    def is_sorted(self) -> bool:
        return True

    def sort_key(self, request: Request) -> Any:
        return request.limit, str(request.id)


@dataclass(frozen=True)
class WrappedVLLM(VLLMV1):
    """A built-in policy with another limit while few requests run."""

    few: int = 2  # running requests
    max_num_seqs: int = 6

    def decide(self, view: View) -> Plan:
        if len(view.running) < self.few:
            return super().decide(view)
        return self.replace(max_num_seqs=self.max_num_seqs + 1, few=FOREVER).decide(view)


@dataclass(frozen=True)
class VLLMDefaults(VLLMV1):
    """A built-in policy with other defaults and rules."""

    max_num_seqs: int = 5
    watermark: float = 0

    def rules(self) -> VLLMRules:
        rules = super().rules()
        rules.engine, rules.reserved_blocks = "mine", 3
        return rules


class SmallChunks(Pass):
    """The pass of a step with at most 16 tokens of one prompt."""

    def limit(self, request: Request, computed: int, tokens: int) -> int:
        return min(tokens, 16)


@dataclass(frozen=True)
class SmallChunksVLLM(VLLMV1):
    """A built-in policy with another pass of a step."""

    def make_pass(self, view: View, tokens: int, free: int) -> Pass:
        return SmallChunks(self, view, tokens, free)


@dataclass(frozen=True)
class FloatHold(FillBatch):
    """Gives a float for a count."""

    def decide(self, view: View) -> Plan:
        return Plan(hold=2.0)  # type: ignore[arg-type]


@dataclass(frozen=True)
class DividesByZero(FillBatch):
    """Fails."""

    def decide(self, view: View) -> Plan:
        return Plan(hold=view.decoding // 0)


@dataclass(frozen=True)
class EndlessRecursion(FillBatch):
    """Calls itself."""

    def decide(self, view: View) -> Plan:
        return self.decide(view)


@dataclass(frozen=True)
class StopsIteration(FillBatch):
    """Takes the first of no requests."""

    def decide(self, view: View) -> Plan:
        next(iter(view.swapped))
        return Plan()


@dataclass(frozen=True)
class RaisesFrom(FillBatch):
    """Raises an error from another one."""

    def decide(self, view: View) -> Plan:
        try:
            return Plan(hold=1 // 0)
        except ZeroDivisionError as error:
            raise LookupError("no plan") from error


@dataclass(frozen=True)
class NoPlan(FillBatch):
    """Returns no plan."""

    def decide(self, view: View) -> Plan:
        return None  # type: ignore[return-value]


@dataclass(frozen=True)
class NoSortKey(FillBatch):
    """Fails to give a sort key."""

    order: str = "priority"

    def sort_key(self, request: Request) -> Any:
        raise LookupError("no key")


@dataclass(frozen=True)
class TooManyTokens(FillBatch):
    """Plans more tokens than a prompt has."""

    def decide(self, view: View) -> Plan:
        return Plan(chunks=[Chunk(request, request.pending + 1) for request in view.waiting])

"""MindSpore llm-serving: fixed slots, prefill first, one prompt per prefill, the shortest request is preempted.

The defaults reproduce the unmodified server. Entries of a 2024 contest used other values; delay_factor.py says what
`delay_variant` means. Without fix_delay_bugs, contest-as-reported fails when no request waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import chain
from typing import Any, Literal, NamedTuple, Optional

from servesim.core import (
    DECODE_PAST_FINISH,
    IDLE_PLAN,
    NO_HOLD,
    UNTIL_FINISH,
    Chunk,
    Float0,
    Hold,
    Int0,
    Int1,
    Plan,
    Policy,
    Preemption,
    Queue,
    Request,
    Stuck,
    View,
    require_effect,
)
from servesim.core.native import mypyc_attr
from servesim.engine.rules import EngineRules
from servesim.policies.delay_factor import Delay, DelayState

from .static import check_blocks, decide_rows, is_out_of_range, reject_out_of_range


class AdmissionState(NamedTuple):
    """Policy state of the delay factor and of the hysteresis."""

    delay: DelayState = DelayState()
    may_admit: bool = True  # hysteresis: False after all slots are used, until enough slots are free


def choose_victim(victim: str, candidates: Sequence[Request]) -> Request:
    """Return the request with the smallest key; on a tie, the one in the lowest slot."""
    chosen = candidates[0]
    lowest, lowest_serial = victim_key(victim, chosen)
    for request in candidates:
        key, serial = victim_key(victim, request)
        if key < lowest or (key == lowest and serial < lowest_serial):
            chosen, lowest, lowest_serial = request, key, serial
    return chosen


def victim_key(victim: str, request: Request) -> tuple[float, int]:
    """Return the sort key: the request with the smallest key is preempted.

    With a front-end lag, the scheduler gets several requests at the same time. The first that was sent is the oldest.
    """
    if victim == "fewest-blocks":
        return request.blocks, 0
    if victim == "oldest":
        return request.arrival, request.serial
    if victim == "newest":
        return -request.arrival, -request.serial
    return request.length if victim == "shortest" else -request.length, 0


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class LLMServing(Policy):
    """The scheduler of MindSpore llm-serving, with settings for the contest entries."""

    decode_batch: Int1 = 1  # number of slots (maximum running requests); the engine pads every decode to it
    prefill_batch: Int1 = 1  # prompts per prefill step; the unmodified server always runs 1
    delay_factor: Float0 = 0.0  # admit when the oldest request has waited this multiple of the last prefill's latency
    # test of the delay: queue or request (as vLLM), contest, contest-as-reported, none
    delay_variant: Literal["none", "queue", "request", "contest", "contest-as-reported"] = "queue"
    fix_delay_bugs: bool = False  # fix two bugs of the contest variants: crash on an empty queue, delay while idle
    # queue of a preempted request: front (FIFO order only), sorted (by `order`), swapped
    preempted_to: Literal["front", "sorted", "swapped"] = "front"
    # queue that fills a free slot: swapped, waiting, older (the older of both heads)
    refill_from: Literal["swapped", "waiting", "older"] = "swapped"
    # request to preempt
    victim: Literal["shortest", "longest", "newest", "oldest", "fewest-blocks"] = "shortest"
    admission_hysteresis: Int0 = 0  # once all slots are used, admit again when more than this number are free; 0: off
    # paged, continuous (no block pool); static batches: static-paged, static (no block pool)
    strategy: Literal["paged", "continuous", "static", "static-paged"] = "paged"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_effect(self, self.delay_variant != "none", "a delay_variant other than none", "delay_factor")
        require_effect(self, self.strategy == "paged", "strategy: paged", "delay_factor", "admission_hysteresis")

    def rules(self) -> EngineRules:
        rules = EngineRules(
            "MindSpore llm-serving 7342f33 (2024-05-24), and contest entries based on it",
            "recordings of the real scheduler, master and worker: 14 hand-written and 60 random cases; a reference "
            "implementation on 2,400 random cases",
        )
        rules.running_order = "slot"
        rules.reserved_blocks = 1  # block 0
        rules.aborts_lost = False
        rules.slots_field, rules.budget_fields = "decode_batch", ("prefill_batch",)
        rules.rejects_oversized = False  # the real server livelocks on a request that never fits
        return rules

    @property
    def uses_block_pool(self) -> bool:
        return self.strategy.endswith("paged")

    def initial_state(self) -> Any:
        if self.strategy != "paged":
            return ()
        return AdmissionState() if self.delay_factor or self.admission_hysteresis else None

    def decide(self, view: View) -> Plan:
        if self.strategy != "paged":
            return self._decide_fixed_rows(view)
        pool, prompts = view.pool, view.prefilling
        free = pool.free - view.cohort.blocks_needed()
        if prompts:
            free -= sum(pool.blocks_for(request.length) for request in prompts)
        if free < 0:
            return self._preempt(view, pool.free - free)
        if view.state is None and not (prompts or view.swapped or view.waiting):
            return DECODE_PAST_FINISH if view.cohort.size else IDLE_PLAN
        admit, state, wake_at = self._admit(view, free)
        queue: Queue = prompts
        if admit:
            queue = self._sort_by_slot(view, admit) if prompts else admit
        return self._make_plan(view, queue, view.cohort.size, admit, (), state, wake_at)

    def _decide_fixed_rows(self, view: View) -> Plan:
        if self.strategy == "static-paged":  # one prompt per prefill, as always with PagedAttention
            return check_blocks(decide_rows(view, self.decode_batch, 1, True), view)
        return decide_rows(view, self.decode_batch, self.prefill_batch, self.strategy == "static")

    def _preempt(self, view: View, need: int) -> Plan:
        """Preempt until the `need` blocks of the others are free. The same step admits no request."""
        preempt = self._choose_preemptions(view, need)
        victims = {preemption.request for preemption in preempt}
        prompts = [request for request in view.prefilling if request not in victims]
        decoding = view.decoding - sum(request.decodes for request in victims)
        return self._make_plan(view, prompts, decoding, (), preempt, view.state, None)

    def _make_plan(
        self, view: View, prompts: Queue, decoding: int, admit: Sequence[Request],
        preempt: Sequence[Preemption], state: Optional[AdmissionState], wake_at: Optional[float],
    ) -> Plan:  # fmt: skip
        """Return the plan: reject out-of-range prompts, else run prompts, else decode."""
        max_length = view.max_model_len
        chunks: list[Chunk] = []
        for request in prompts:
            if is_out_of_range(request, max_length):
                reject = reject_out_of_range(prompts, max_length)
                return Plan(preempt=preempt, admit=admit, reject=reject, state=state)
            if len(chunks) < self.prefill_batch:
                chunks.append(Chunk(request, request.prompt + request.written))
        if not chunks:
            hold = NO_HOLD if preempt or not decoding else UNTIL_FINISH
            if wake_at is not None:
                hold = Hold(hold.steps, until=wake_at)
            return Plan(preempt=preempt, admit=admit, decode=decoding > 0, hold=hold, state=state)
        if len(chunks) == len(prompts) and not view.prefilling:
            admit = ()  # the chunks admit them in the same order
        return Plan(preempt=preempt, admit=admit, chunks=chunks, state=state)

    def _choose_preemptions(self, view: View, need: int) -> list[Preemption]:
        """Return the preemptions that free enough blocks for the next step of the other requests."""
        pool, free = view.pool, view.pool.free
        candidates = list(view.running)
        preempt = []
        while need > free:
            victim = choose_victim(self.victim, candidates)
            candidates.remove(victim)
            preempt.append(Preemption(victim, "recompute", self.preempted_to))
            free += victim.blocks
            tokens = victim.cached + 1 if victim.decodes else victim.length
            need -= pool.blocks_for(tokens) - (victim.blocks if victim.decodes else 0)
        return preempt

    def _admit(self, view: View, free: int) -> tuple[list[Request], Optional[AdmissionState], Optional[float]]:
        """Fill free slots from the heads of the queues, as far as delay factor and hysteresis allow.

        Return the requests, the new policy state, and when a delayed request may be admitted.
        """
        size, slots = view.pool.block_size, self.decode_batch - len(view.running)
        state: Optional[AdmissionState] = view.state  # None: there is neither delay nor hysteresis
        delay = self._delay(view, state.delay) if state is not None and self.delay_factor > 0 else None
        may_admit = True
        if state is not None and self.admission_hysteresis:
            may_admit = state.may_admit or slots > self.admission_hysteresis
            slots = slots if may_admit else 0
        admit: list[Request] = []
        from_waiting, wake_at = 0, None
        for request in self._queue_order(view):
            if len(admit) >= slots:
                break
            delay_of_new = delay if request.status == "waiting" else None  # a swapped one may come back at any time
            if delay_of_new is not None and not delay_of_new.allows(from_waiting, len(admit)):
                wake_at = delay_of_new.wake_at
                break
            free -= -(-(request.prompt + request.written) // size)
            if free < 0:
                break
            admit.append(request)
            if delay_of_new is not None:
                from_waiting += 1
                delay_of_new.record_prefill()
        if state is not None:
            may_admit = may_admit and not (self.admission_hysteresis and len(admit) >= slots)
            delayed = state.delay if delay is None else delay.state
            if delayed is not state.delay or may_admit != state.may_admit:  # most steps change neither
                state = AdmissionState(delayed, may_admit)
        return admit, state, wake_at

    def _delay(self, view: View, state: DelayState) -> Delay:
        """Return the delay factor of this step."""
        if self.delay_variant == "contest-as-reported" and not self.fix_delay_bugs and not view.waiting:
            why = (
                "llm-serving's delay code calls min() on an empty waiting queue, and its serving loop ends; "
                "set fix_delay_bugs: true to avoid this"
            )
            raise Stuck(why, list(view.running), view.now)
        waits_idle = self.delay_variant.startswith("contest") and not self.fix_delay_bugs
        return Delay(self.delay_factor, self.delay_variant, view, state, waits_idle)

    def _queue_order(self, view: View) -> Iterator[Request]:
        """Return the swapped and waiting requests in the order of admission."""
        if not view.swapped:
            return iter(view.waiting)
        if self.refill_from == "older":
            return merge(view.swapped, view.waiting, key=lambda request: request.arrival)
        if self.refill_from == "waiting":
            return chain(view.waiting, view.swapped)
        return chain(view.swapped, view.waiting)

    def _sort_by_slot(self, view: View, admit: list[Request]) -> list[Request]:
        """Return the prefilling and the admitted requests by slot. Admitted requests take the lowest free slots."""
        used = {request.slot for request in view.running}
        free = (slot for slot in range(self.decode_batch) if slot not in used)
        slots = dict(zip(admit, free))
        slots.update((request, request.slot or 0) for request in view.prefilling)
        return sorted(slots, key=lambda request: slots[request])

"""MindIE-LLM: rounds of prefills or of decodes, chosen by `stage_policy`; SplitFuse mixes both.

Four things differ from other engines. The number of seats limits a round, not the running requests: more of them
decode in turns. A finished request keeps its place and its blocks until a round takes it from its queue. A round
without work costs a millisecond. A preempted request goes to the back of the waiting queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any, Optional

from servesim.core import FOREVER, BlockPool, Chunk, Plan, Request, View
from servesim.core.native import mypyc_attr

from .feedback import Batch, DynamicBatch, Feedback, LatencyFit, microseconds
from .round import MindIESettings, Round, by_arrival
from .rules import MindIERules


class MindIEState:
    """Policy state: what the scheduler keeps from one round to the next."""

    __slots__ = ("feedback", "kind", "last_empty", "new_first", "resumed", "tail", "waste", "waste_step")

    def __init__(
        self,
        kind: str = "",
        last_empty: bool = False,
        new_first: bool = False,
        waste: int = 0,
        waste_step: int = 0,
        resumed: int = 0,
        tail: int = 0,
        feedback: Optional[Feedback] = None,
    ) -> None:
        self.kind = kind  # of the last round: P, D or M
        self.last_empty = last_empty  # the last round did nothing
        self.new_first = new_first  # the next running pass preempts one request, for a new one that waits too long
        self.waste = waste  # seats that decodes have left empty, weighted (throughput)
        self.waste_step = waste_step  # what one more held step adds to it
        self.resumed = resumed  # preempted requests in waiting
        # the requests before the last `tail` of running are in the order of arrival; -1: in another order
        self.tail = tail
        self.feedback = feedback  # None: the settings need no results

    def _values(self) -> tuple[Any, ...]:
        return (
            self.kind, self.last_empty, self.new_first, self.waste, self.waste_step, self.resumed, self.tail,
            self.feedback,
        )  # fmt: skip

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MindIEState) and self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]  # nothing needs it

    def __repr__(self) -> str:
        return f"MindIEState{self._values()}"


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class MindIE(MindIESettings):
    """The scheduler of MindIE-LLM 3.0.0. `engine.max_model_len` is its maxSeqLen."""

    def rules(self) -> MindIERules:
        return MindIERules(2 if self.async_scheduling else 1)

    @property
    def learns(self) -> bool:
        return self._learns

    def max_output(self, prompt: int, pool: BlockPool, max_model_len: Optional[int]) -> int:
        return min(super().max_output(prompt, pool, max_model_len), self.max_iter_times)

    def engine_refusals(self, block_size: int, max_model_len: Optional[int]) -> list[str]:
        refusals = []
        if self.max_prefill_batch_size > self.max_batch_size:
            refusals.append(f"max_prefill_batch_size ({self.max_prefill_batch_size}) is above max_batch_size")
        if self.max_preempt_count > self.max_batch_size:
            refusals.append(f"max_preempt_count ({self.max_preempt_count}) is above max_batch_size")
        if block_size > 128:
            refusals.append(f"engine.block_size ({block_size}) is above 128")
        return refusals

    @property
    def _learns(self) -> bool:
        return not self.split_fuse and (self.stage_policy == "latency" or self.dynamic_batch_size)

    @property
    def prefill_seats(self) -> int:
        """The seats of a prefill round at the start."""
        return self.max_prefill_batch_size or self.max_batch_size

    def initial_state(self) -> Any:
        is_latency = self.stage_policy == "latency"
        if not self._learns:
            return MindIEState()
        dynamic = DynamicBatch(self.max_batch_size, self.prefill_seats) if self.dynamic_batch_size else None
        return MindIEState(feedback=Feedback(LatencyFit() if is_latency else None, dynamic))

    def advance_state(self, state: Any, steps: int) -> Any:
        old: MindIEState = state
        if not old.waste_step:
            return old
        return MindIEState(
            old.kind, waste=old.waste + steps * old.waste_step, waste_step=old.waste_step, resumed=old.resumed,
            tail=old.tail,
        )  # fmt: skip

    def held_state(self, state: Any, now: float) -> Any:
        """All requests decode again, unless the latency predictor or the dynamic batch size wants something else."""
        old: MindIEState = state
        if old.feedback is None:
            return old
        time, size, dynamic = microseconds(now), old.feedback.out[0].size, old.feedback.dynamic
        if dynamic is not None and dynamic.seats < size:
            return None
        feedback = old.feedback.received(time, False)
        feedback.queue = old.feedback.queue
        if feedback.queue is not None:
            assert feedback.fit is not None
            if feedback.fit.decode[1] > 0:  # the number of blocks counts, which only a view has
                return None
            if self._prefers_prefill(feedback, size, 0, time):
                return None
        self._learn(feedback, Batch(time, False, (), size, 0, 0), False, size, 0)
        return MindIEState("D", resumed=old.resumed, feedback=feedback)

    def decide(self, view: View) -> Plan:
        state: MindIEState = view.state
        if not (view.running or view.waiting or view.swapped):
            return Plan(state=state)
        seats, prefill_seats, feedback = self.max_batch_size, self.prefill_seats, state.feedback
        if feedback is not None:
            feedback = feedback.received(microseconds(view.now), self.async_scheduling)
            if feedback.dynamic is not None:
                seats, prefill_seats = feedback.dynamic.seats, feedback.dynamic.prefill_seats
            feedback.look_at_queue(view, seats)
        kind, waste = self._choose_kind(view, state, feedback, seats, prefill_seats)
        if kind == "P":
            seats = prefill_seats
        if feedback is None or not self.async_scheduling:
            plan = self._usual_round(view, state, kind, waste, seats, feedback)
            if plan is not None:
                return plan
        done = Round(self, view, kind, seats, state.new_first)
        plan = done.plan()
        if feedback is not None:
            feedback.name_all(view)
            self._learn_from(view, done, feedback)
        plan.state = self._after(state, done, waste, feedback)
        return plan

    def _choose_kind(
        self, view: View, state: MindIEState, feedback: Optional[Feedback], seats: int, prefill_seats: int
    ) -> tuple[str, int]:
        """Return the kind of this round, and the new `waste`."""
        if self.split_fuse:
            return "M", 0
        if state.last_empty and view.running:
            return "D", state.waste
        if self.stage_policy == "prefill-first":
            reserve = view.pool.total // 20
            if view.swapped or view.pool.free < reserve or not self._is_ripe(view, prefill_seats):
                return "D", 0
            return "P", 0
        if self.stage_policy == "throughput":
            return self._weigh(view, state.waste, seats)
        if not view.running:
            return "P", 0
        assert feedback is not None
        if feedback.queue is None or not prefill_seats:
            return "D", 0
        rows, blocks = len(view.running), view.pool.held
        if rows > seats or view.swapped:
            running, swapped = list(islice(view.running, seats)), list(islice(view.swapped, seats))
            rows = len(running) + len(swapped)
            blocks = sum([request.blocks for request in running])
            blocks += sum([view.pool.blocks_for(request.length) for request in swapped])
        prefill = self._prefers_prefill(feedback, rows, blocks, microseconds(view.now))
        return "P" if prefill else "D", 0

    def _prefers_prefill(self, feedback: Feedback, rows: int, blocks: int, now: int) -> bool:
        """Whether less of the target time of prefills is left than of that of decodes."""
        assert feedback.fit is not None and feedback.queue is not None
        (tokens, arrival), targets = feedback.queue, (self.prefill_expected_time, self.decode_expected_time)
        return feedback.fit.prefers_prefill(targets, (now - arrival) // 1000, tokens, rows, blocks)

    def _is_ripe(self, view: View, prefill_seats: int) -> bool:
        """Whether a prefill may start: its first request has waited long enough, or its batch is full."""
        if not view.waiting:
            return False
        delay = self.max_queue_delay_microseconds
        if delay > 5000 and len(view.waiting) >= prefill_seats:
            return True
        return microseconds(view.now) - microseconds(view.waiting[0].arrival) >= delay

    def _weigh(self, view: View, waste: int, seats: int) -> tuple[str, int]:
        """Throughput: prefill if the seats that decodes left empty weigh as much as the running requests."""
        if not view.waiting:
            return "D", 0
        count = len(view.running)
        if count <= seats:
            waste += self.decode_time_ms_per_req * (seats - count)
        return ("D", waste) if self.prefill_time_ms_per_req * count > waste else ("P", 0)

    def _usual_round(
        self, view: View, state: MindIEState, kind: str, waste: int, seats: int, feedback: Optional[Feedback]
    ) -> Optional[Plan]:
        """Return the plan of a round without preempted requests in which all running requests fit; None: not so."""
        if kind == "P":
            return None if state.resumed else self._prefill(view, state, seats, feedback)
        live = view.decoding + len(view.prefilling)
        if live > seats or view.decoding > self.token_budget(view) or state.new_first or view.swapped:
            return None
        release = [request for request in view.finished if request.blocks]  # those in running
        free = view.pool.free + sum([request.blocks for request in release]) - view.decode_block_need
        if free < 0:
            return None
        if kind == "M" and (view.waiting or state.tail or not live):
            return None if state.resumed or state.tail < 0 else self._mix(view, state, release, free)
        if not live:
            return None
        if feedback is not None:
            joined = feedback.joined(view.running)
            if joined is None or state.tail:
                return None
            batch = Batch(microseconds(view.now), False, joined, live - len(joined), 0, view.pool.total - free)
            self._learn(feedback, batch, False, live, len(view.waiting))
        return self._decode(view, state, kind, waste, release, free, feedback)

    def _prefill(self, view: View, state: MindIEState, seats: int, feedback: Optional[Feedback]) -> Plan:
        """Return the plan of a prefill round. Candidates that are left stay in their order."""
        done = Round(self, view, "P", 0, state.new_first)
        done.seats = seats
        if seats:  # otherwise the round has no candidates
            done.admit(view.waiting)
        if feedback is not None:
            self._learn_from(view, done, feedback)
        after = MindIEState("P", not done.admitted, done.new_first, tail=state.tail, feedback=feedback)
        return Plan(chunks=done.admitted, state=after)

    def _decode(
        self, view: View, state: MindIEState, kind: str, waste: int, release: list[Request], free: int,
        feedback: Optional[Feedback],
    ) -> Plan:  # fmt: skip
        """Return the plan of a round in which all running requests decode."""
        order = None
        if state.tail:
            order = [request for request in view.running if request.status != "done"]
            order.sort(key=by_arrival)
        hold, step, wake_at = self._hold(view, waste, free, feedback)
        after = MindIEState(kind, waste=waste, waste_step=step, resumed=state.resumed, feedback=feedback)
        return Plan(
            release=release, decode=True, reorder_running=order, hold=hold, wake_at=wake_at,
            hold_past_finish=not view.waiting and feedback is None, state=after,
        )  # fmt: skip

    def _mix(self, view: View, state: MindIEState, release: list[Request], free: int) -> Plan:
        """Return the plan of a mixed round in which all running requests run. The order of the tail decides."""
        done = Round(self, view, "M", 0, False)
        tail = [request for request in islice(reversed(view.running), state.tail) if request.status != "done"]
        tail.reverse()
        decodes = [request for request in tail if request.decodes]
        done.free, done.seats = free, self.max_batch_size - view.decoding - len(view.prefilling)
        done.tokens -= view.decoding - len(decodes)
        for request in tail:
            tokens = done.chunk(request, request.decodes)
            done.tokens -= tokens
            if not request.decodes:
                done.running_chunks.append(Chunk(request, tokens))
        if view.waiting:
            done.admit(islice(view.waiting, 2 * self.max_batch_size - view.decoding - len(view.prefilling)))
        prompts = done.admitted + done.running_chunks
        chunks = [chunk for chunk in prompts if chunk.tokens]
        decodes.sort(key=by_arrival)
        ahead, order = max(0, len(view.running) - state.tail), None  # requests of the tail may be aborted
        is_behind = not (decodes and ahead) or by_arrival(view.running[ahead - 1]) < by_arrival(decodes[0])
        if not is_behind or decodes + [c.request for c in prompts] != tail + [c.request for c in done.admitted]:
            order = [request for request in islice(view.running, ahead) if request.status != "done"] + decodes
            order.sort(key=by_arrival)
            order += [chunk.request for chunk in prompts]
        hold, wake_at = (0, None) if prompts or done.new_first else self._hold_mixed(view)
        return Plan(
            release=release, chunks=chunks, decode=view.decoding > 0, decode_first=True, reorder_running=order,
            hold=hold, wake_at=wake_at, hold_past_finish=not view.waiting,
            state=MindIEState("M", not (chunks or view.decoding), done.new_first, tail=len(prompts)),
        )  # fmt: skip

    def _hold_mixed(self, view: View) -> tuple[int, Optional[float]]:
        """Return for how many rounds no prompt starts, and when the first waiting request asks for a preemption."""
        if not view.waiting:
            return FOREVER, None
        late = microseconds(view.waiting[0].arrival) + (self.max_first_token_wait_time + 1) * 1000
        if microseconds(view.now) >= late or not self.max_long_partial_prefills:
            return 0, None
        return FOREVER, (late - 1) * 1e-6

    def _hold(
        self, view: View, waste: int, free: int, feedback: Optional[Feedback]
    ) -> tuple[int, int, Optional[float]]:
        """Return how many further rounds decode all requests, what each adds to `waste`, and when they end at last."""
        if not view.waiting:
            return FOREVER, 0, None
        if feedback is not None:  # `held_state` compares the laxities; the dynamic batch size changes the prompts
            return FOREVER if feedback.dynamic is None else 0, 0, None
        if self.stage_policy == "throughput":
            count = view.decoding
            step = self.decode_time_ms_per_req * (self.max_batch_size - count)
            missing = self.prefill_time_ms_per_req * count - waste  # above 0 as long as rounds decode
            return (max(0, -(-missing // step) - 1) if step else FOREVER if missing > 0 else 0), step, None
        if free < view.pool.total // 20:  # at least until a request finishes
            return FOREVER, 0, None
        if self._is_ripe(view, self.prefill_seats):
            return 0, 0, None
        return FOREVER, 0, view.waiting[0].arrival + (self.max_queue_delay_microseconds - 1) * 1e-6

    def _learn_from(self, view: View, done: Round, feedback: Feedback) -> None:
        """Note a round with these chunks and decodes."""
        chunks, is_prefill = done.admitted, done.kind == "P"
        rows = [chunk.request for chunk in chunks] if is_prefill else done.decodes
        tokens = sum([chunk.tokens for chunk in chunks])
        blocks = 0 if is_prefill else sum([view.pool.blocks_for(request.cached + 1) for request in rows])
        batch = Batch(microseconds(view.now), is_prefill, rows, None, tokens, blocks)
        moved = len(done.recomputes) - len(chunks)
        live = len(view.running) + len(view.swapped) - moved - len(done.release)
        self._learn(feedback, batch, done.is_empty, live, len(view.waiting) + moved)

    def _learn(self, feedback: Feedback, batch: Batch, is_empty: bool, live: int, waiting: int) -> None:
        """Note a round, after which `live` requests run or are swapped."""
        feedback.decided(batch, is_empty)
        dynamic = feedback.dynamic
        if dynamic is not None and (not is_empty or not dynamic.prefill_seats):
            if not (batch.is_prefill or is_empty):
                dynamic.rows = dynamic.rows.added(batch.size, batch.size)
            dynamic.update(self.max_batch_size, self.decode_expected_time, live, waiting)

    def _after(self, state: MindIEState, done: Round, waste: int, feedback: Optional[Feedback]) -> MindIEState:
        """Return the state after a round."""
        admitted = [chunk.request for chunk in done.admitted]
        resumed = state.resumed + len(done.recomputes) - sum([request.preemptions > 0 for request in admitted])
        if done.kind == "P":
            tail = state.tail if resumed == state.resumed else -1
            resumed -= len(done.release)
        elif done.running or len(done.view.running) > done.popped[0]:
            tail = -1
        else:
            tail = len(admitted) + len(done.swapped_chunks) + len(done.running_chunks)
        return MindIEState(
            done.kind, done.is_empty, done.new_first, waste, resumed=resumed, tail=tail, feedback=feedback
        )

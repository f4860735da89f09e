"""MindIE-LLM: rounds of prefills or of decodes, chosen by `stage_policy`; SplitFuse mixes both.

Four things differ from other engines. The number of seats limits a round, not the running requests: more of them
decode in turns. A finished request keeps its place and its blocks until a round takes it from its queue. A round
without work costs a millisecond. A preempted request goes to the back of the waiting queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Optional

from servesim.core import DECIDE, FOREVER, PAST_FINISH, BlockPool, Hold, Plan, Request, View
from servesim.core.native import mypyc_attr

from .feedback import Batch, DynamicBatch, Feedback, LatencyFit, Statistics, microseconds
from .round import MindIESettings, Round
from .rules import MindIERules
from .state import MindIEState


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class MindIE(MindIESettings):
    """The scheduler of MindIE-LLM 3.0.0. `engine.max_model_len` is its maxSeqLen."""

    def rules(self) -> MindIERules:
        return MindIERules(2 if self.async_scheduling else 1, self.max_input_token_len)

    def max_output(self, prompt: int, pool: BlockPool, max_model_len: Optional[int]) -> int:
        return min(super().max_output(prompt, pool, max_model_len), self.max_iter_times)

    def engine_refusals(self, block_size: int, max_model_len: Optional[int]) -> list[str]:
        refusals = []
        if self.max_prefill_batch_size > self.max_batch_size:
            refusals.append(f"max_prefill_batch_size ({self.max_prefill_batch_size}) is above max_batch_size")
        if self.max_preempt_count > self.max_batch_size:
            refusals.append(f"max_preempt_count ({self.max_preempt_count}) is above max_batch_size")
        if self.max_prefill_tokens < (self.max_input_token_len or 0):
            refusals.append(f"max_prefill_tokens ({self.max_prefill_tokens}) is below max_input_token_len")
        if block_size > 128:
            refusals.append(f"engine.block_size ({block_size}) is above 128")
        return refusals

    @property
    def learns(self) -> bool:
        """Whether the scheduler learns from the time of every step."""
        return not self.split_fuse and (self.stage_policy == "latency" or self.dynamic_batch_size)

    @property
    def prefill_seats(self) -> int:
        """The seats of a prefill round at the start."""
        return self.max_prefill_batch_size or self.max_batch_size

    def initial_state(self) -> Any:
        is_latency = self.stage_policy == "latency"
        if not self.learns:
            return MindIEState()
        dynamic = DynamicBatch(self.max_batch_size, self.prefill_seats) if self.dynamic_batch_size else None
        return MindIEState(feedback=Feedback(LatencyFit() if is_latency else None, dynamic))

    def held_state(self, state: Any, now: float) -> Any:
        """All requests decode again, unless the latency predictor or the dynamic batch size wants something else."""
        old: MindIEState = state
        if old.feedback is None:
            if not old.waste_step:
                return old
            waste = old.waste + old.waste_step
            return MindIEState(
                old.kind, old.last_empty, old.new_first, waste, old.waste_step, old.resumed, old.tail, old.feedback
            )
        time, size, dynamic = microseconds(now), old.feedback.out[0].size, old.feedback.dynamic
        if dynamic is not None and dynamic.seats < size:
            return DECIDE
        feedback = old.feedback.received(time, False)
        feedback.queue = old.feedback.queue
        if feedback.queue is not None:
            assert feedback.fit is not None
            if feedback.fit.decode[1] > 0:  # the number of blocks counts, which only a view has
                return DECIDE
            if self._prefers_prefill(feedback, size, 0, time):
                return DECIDE
        self._learn(feedback, Batch(time, (), size), (False, 0, size, 0), False, size, 0)
        return MindIEState("D", resumed=old.resumed, feedback=feedback)

    def decide(self, view: View) -> Plan:
        """Learn from the results that have come, choose the kind of the round, run it, and say how long it holds."""
        state: MindIEState = view.state
        if not (view.running or view.waiting or view.swapped):
            return Plan(state=state)
        feedback = self._receive(view, state.feedback)
        kind, waste = self._choose_kind(view, feedback)
        seats, prefill_seats = self._seats(feedback)
        joined = None if feedback is None else self._joined(view, kind, feedback)
        by_name = feedback is not None and joined is None
        round = Round(self, view, kind, prefill_seats if kind == "P" else seats, by_name)
        round.run()
        plan, waste_step = round.plan(), 0
        if feedback is not None:
            self._learn_from(round, feedback, joined)
        if round.all_run and plan.decode and not plan.chunks:
            if not view.waiting and feedback is None:
                plan.hold = PAST_FINISH
            else:
                steps, waste_step, until = self._hold(round, waste, feedback)
                plan.hold = Hold(steps, until=until)
        plan.state = round.state(waste, waste_step, feedback)
        return plan

    def _receive(self, view: View, before: Optional[Feedback]) -> Optional[Feedback]:
        """Return what the results of earlier rounds and the queue say; None: the settings need no results."""
        if before is None:
            return None
        feedback = before.received(microseconds(view.now), self.async_scheduling)
        feedback.look_at_queue(view, self._seats(feedback)[0])
        return feedback

    def _seats(self, feedback: Optional[Feedback]) -> tuple[int, int]:
        """Return the seats of a decode round and of a prefill round."""
        if feedback is None or feedback.dynamic is None:
            return self.max_batch_size, self.prefill_seats
        return feedback.dynamic.seats, feedback.dynamic.prefill_seats

    def _choose_kind(self, view: View, feedback: Optional[Feedback]) -> tuple[str, int]:
        """Return the kind of this round, and the new `waste`."""
        state: MindIEState = view.state
        if self.split_fuse:
            return "M", 0
        if state.last_empty and view.running:
            return "D", state.waste
        seats, prefill_seats = self._seats(feedback)
        if self.stage_policy == "throughput":
            return self._weigh(view, state.waste, seats)
        if self.stage_policy == "prefill-first":
            return "P" if self._may_prefill(view, prefill_seats) else "D", 0
        assert feedback is not None
        return "P" if self._lacks_prefill(view, feedback, seats, prefill_seats) else "D", 0

    def _may_prefill(self, view: View, prefill_seats: int) -> bool:
        """Prefill first: only swapped requests, few free blocks, and requests that have just arrived prevent it."""
        return not view.swapped and view.pool.free >= reserve(view) and self._is_ripe(view, prefill_seats)

    def _is_ripe(self, view: View, prefill_seats: int) -> bool:
        """Whether a prefill may start: its first request has waited long enough, or its batch is full."""
        if not view.waiting:
            return False
        delay = self.max_queue_delay_microseconds
        if delay > 5000 and len(view.waiting) >= prefill_seats:  # with the shipped 5000, a full batch waits, too
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

    def _lacks_prefill(self, view: View, feedback: Feedback, seats: int, prefill_seats: int) -> bool:
        """Latency: prefill if less of the target time of prefills is left than of that of decodes."""
        if not view.running:
            return True
        if not (view.waiting and prefill_seats):
            return False
        rows, blocks = len(view.running), view.pool.held
        if rows > seats or view.swapped:
            running, swapped = list(islice(view.running, seats)), list(islice(view.swapped, seats))
            rows = len(running) + len(swapped)
            blocks = sum([request.blocks for request in running])
            blocks += sum([view.pool.blocks_for(request.length) for request in swapped])
        return self._prefers_prefill(feedback, rows, blocks, microseconds(view.now))

    def _prefers_prefill(self, feedback: Feedback, rows: int, blocks: int, now: int) -> bool:
        """Ask the latency predictor, with the prompts that wait and the requests that would decode."""
        assert feedback.fit is not None and feedback.queue is not None
        (tokens, arrival), targets = feedback.queue, (self.prefill_expected_time, self.decode_expected_time)
        return feedback.fit.prefers_prefill(targets, (now - arrival) // 1000, tokens, rows, blocks)

    def _hold(self, round: Round, waste: int, feedback: Optional[Feedback]) -> tuple[int, int, Optional[float]]:
        """Return how many further rounds decode all requests, what each adds to `waste`, and when they end at last."""
        view = round.view
        if feedback is not None and feedback.out[-1].others is None:  # it follows each request by itself
            return 0, 0, None
        if not view.waiting:
            return FOREVER, 0, None
        if feedback is not None:  # `held_state` compares the laxities; the dynamic batch size changes the prompts
            return FOREVER if feedback.dynamic is None else 0, 0, None
        if round.kind == "M":
            return self._hold_mixed(round)
        if self.stage_policy == "throughput":
            count = view.decoding
            step = self.decode_time_ms_per_req * (self.max_batch_size - count)
            missing = self.prefill_time_ms_per_req * count - waste  # above 0 as long as rounds decode
            return (max(0, -(-missing // step) - 1) if step else FOREVER if missing > 0 else 0), step, None
        if round.free < reserve(view):  # at least until a request finishes
            return FOREVER, 0, None
        if self._is_ripe(view, self.prefill_seats):
            return 0, 0, None
        return FOREVER, 0, view.waiting[0].arrival + (self.max_queue_delay_microseconds - 1) * 1e-6

    def _hold_mixed(self, round: Round) -> tuple[int, int, Optional[float]]:
        """The same for SplitFuse: no prompt starts until the first waiting request asks for a preemption."""
        view = round.view
        late = microseconds(view.waiting[0].arrival) + (self.max_first_token_wait_time + 1) * 1000
        is_late = round.new_first or microseconds(view.now) >= late
        if is_late or round.before.resumed or not self.max_long_partial_prefills:
            return 0, 0, None
        return FOREVER, 0, (late - 1) * 1e-6

    def _joined(self, view: View, kind: str, feedback: Feedback) -> Optional[list[Request]]:
        """Return the requests that have not decoded together with all others; None: follow each request by itself."""
        state: MindIEState = view.state
        if kind != "D" or state.tail or self.async_scheduling:
            return None
        return feedback.joined(view.running)

    def _learn_from(self, round: Round, feedback: Feedback, joined: Optional[list[Request]]) -> None:
        """Note a round."""
        view, pool, others, tokens, blocks = round.view, round.view.pool, None, 0, 0
        rows: Sequence[Request]
        if round.kind == "P":
            rows, tokens = [chunk.request for chunk in round.admitted], sum([chunk.tokens for chunk in round.admitted])
        elif round.all_run and joined is not None:
            rows, others, blocks = joined, view.decoding - len(joined), pool.total - round.free
        else:
            feedback.name_all(view)
            rows, blocks = round.decodes, sum([pool.blocks_for(request.cached + 1) for request in round.decodes])
        batch = Batch(microseconds(view.now), rows, others)
        statistics = (round.kind == "P" and not round.is_empty, tokens, batch.size, blocks)
        moved = len(round.recomputes) - len(round.admitted)
        live = len(view.running) + len(view.swapped) - moved - len(round.release)
        self._learn(feedback, batch, statistics, round.is_empty, live, len(view.waiting) + moved)

    def _learn(
        self, feedback: Feedback, batch: Batch, statistics: Statistics, is_empty: bool, live: int, waiting: int
    ) -> None:
        """Note a round, after which `live` requests run or are swapped."""
        feedback.decided(batch, statistics, is_empty)
        dynamic = feedback.dynamic
        if dynamic is not None and (not is_empty or not dynamic.prefill_seats):
            if not (statistics[0] or is_empty):  # a decode round
                dynamic.rows = dynamic.rows.added(batch.size, batch.size)
            dynamic.update(self.max_batch_size, self.decode_expected_time, live, waiting)


def reserve(view: View) -> int:
    """Return the free blocks below which prefill first decodes: 5 %."""
    return view.pool.total // 20

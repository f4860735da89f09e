"""Run a servesim policy inside MindSpore llm-serving: the policy decides which requests fill the server's slots.

The adapter replaces the function that fills the slots; for several prompts per prefill see grouped_prefill.py. On every
call it reads the server's state: its waiting queue, its slots and its blocks. The adapter keeps what the server lacks:
a queue for preempted requests and the policy state. Python 3.9, standard library, servesim's core and policies.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from operator import attrgetter
from typing import Any, Callable, Optional
from weakref import WeakKeyDictionary

from servesim.core import BadInput, BlockPool, Chunk, Plan, Policy, Preemption, Request, View
from servesim.engine.cohort import Cohort
from servesim.engine.queues import FifoQueue, SortedQueue
from servesim.engine.rules import rules_of

from .grouped_prefill import install_repair, server_module
from .policy_state import POLICY_VARIABLE, PolicyState, fields_from, make_policy

LIVE_STATUSES = ("RUNNING", "INPUT_OUTOFRANGE")  # of occupied slots


class Adapter(PolicyState):
    """A policy inside one server."""

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.perf_counter) -> None:
        if rules_of(policy).running_order != "slot" or getattr(policy, "strategy", "paged") != "paged":
            raise BadInput("adapter: expected a policy of the llm-serving family (with slots and KV blocks)")
        super().__init__(policy)
        self.clock = clock
        self.swapped: deque[Any] = deque()  # preempted entries that wait in a separate queue
        self.prompts: list[int] = []  # slots that the next call prefills

    def fill_slots(self, schedule: Any) -> None:
        """Fill the slots of a schedule, as `_continuous_batch_pa` does in the stock server."""
        if getattr(self.policy, "decode_batch", None) != schedule.batch_size:  # the server's setting or padding bucket
            self.policy = self.policy.replace(decode_batch=schedule.batch_size)
        schedule.try_initialize_paddings_pa()
        now = self.clock()
        view, entries = self.read_state(schedule, now)
        plan = self.decide(view)
        self.apply(plan, schedule, entries)
        self.prompts = sorted(self._slot(chunk, schedule, entries) for chunk in plan.chunks)

    def read_state(self, schedule: Any, now: float) -> tuple[View, dict[Request, Any]]:
        """Return the policy's view of the server, and the entry of each request."""
        slots = schedule.running_request_list
        cache = slots[0].cache_engine
        pool = BlockPool(cache.pool.num_blocks + len(cache.pool.used_blocks) - 1, cache.block_size)
        pool.free = len(cache.pool.free_blocks)
        cohort = Cohort(cache.block_size)
        entries: dict[Request, Any] = {}
        waiting, swapped, finished = self.waiting_queue(), FifoQueue(), FifoQueue()
        running, prefilling = SortedQueue(attrgetter("slot")), SortedQueue(attrgetter("slot"))
        for slot, entry in enumerate(slots):
            if is_live(entry):
                request = self.request_of(entry, now)
                entries[request] = entry
                update(request, entry, "running", slot)
                running.push(request)
                if entry.is_prompt:
                    prefilling.push(request)
                else:
                    cohort.join(request)
        self._sync_queue(schedule.waiting_request_queue, waiting, "waiting", now, entries)
        self._sync_queue(self.swapped, swapped, "swapped", now, entries)
        self.promote(waiting, now)
        view = View(waiting, running, swapped, prefilling, finished, pool, cohort, schedule.max_input_len)
        view.now = now
        return view, entries

    def _sync_queue(self, source: Any, queue: Any, status: str, now: float, entries: dict[Request, Any]) -> None:
        for entry in source:
            request = self.request_of(entry, now)
            entries[request] = entry
            update(request, entry, status)
            queue.push(request)

    def make_request(self, entry: Any, now: float) -> Request:
        """Return the request of an entry. Its arrival time is the first time the adapter sees it."""
        data = entry.get_entry_data()
        limit = data.get_max_token_len()
        return Request(entry.request_id, now, data.get_prompt_len(), max(1, limit), limit)

    def apply(self, plan: Plan, schedule: Any, entries: dict[Request, Any]) -> None:
        """Apply a plan to the server's slots and queues; the server runs the model call itself."""
        for preemption in plan.moves.preempt:
            self._preempt(preemption, schedule, entries[preemption.request])
        for request in plan.moves.admit:
            self._admit(schedule, entries[request])
        for chunk in plan.chunks:  # a first chunk also admits its request
            if chunk.request.status != "running" and chunk.request not in plan.moves.admit:
                self._admit(schedule, entries[chunk.request])

    def _preempt(self, preemption: Preemption, schedule: Any, entry: Any) -> None:
        """Take an entry out of its slot: free its blocks and keep its output tokens."""
        data = entry.get_entry_data()
        slot = schedule.running_request_list.index(entry)
        logging.warning("preempted %s from slot %s", entry.request_id, slot)
        data.set_status(type(data.get_status())["WAITING"])
        data.set_decode_index(0)
        entry.is_prompt = True
        entry.cache_engine.release_cache()
        self.forget_promotion(preemption.request)
        if preemption.queue == "swapped":
            self.swapped.append(entry)
        elif preemption.queue == "sorted" and not self.policy.is_sorted:
            schedule.waiting_request_queue.append(entry)
        else:  # the position does not matter in a sorted queue
            schedule.waiting_request_queue.appendleft(entry)
        schedule.insert_padding_entry(slot)

    def _admit(self, schedule: Any, entry: Any) -> None:
        """Admit an entry to the first free slot. The server admits from the head of its queue, so move it there."""
        queue = self.swapped if entry in self.swapped else schedule.waiting_request_queue
        queue.remove(entry)
        schedule.waiting_request_queue.appendleft(entry)
        free = next(slot for slot, other in enumerate(schedule.running_request_list) if not is_live(other))
        schedule._insert_new_prompt_to_batch_pa(free)

    def _slot(self, chunk: Chunk, schedule: Any, entries: dict[Request, Any]) -> int:
        request, tokens = chunk.request, chunk.tokens
        assert tokens == request.prompt + request._written, "llm-serving runs whole prompts"
        slot: int = schedule.running_request_list.index(entries[request])
        return slot


def is_live(entry: Any) -> bool:
    """Return whether a slot is occupied."""
    return entry.get_entry_data().get_status().name in LIVE_STATUSES


def update(request: Request, entry: Any, status: str, slot: Optional[int] = None) -> None:
    """Copy the state of an entry, in a slot or in a queue, to its request."""
    cached = slot is not None and not entry.is_prompt
    request.status, request.slot, request._cohort = status, slot, None
    request._written = entry.get_entry_data().get_output_len()
    request._cached = entry.cache_engine.num_token if cached else 0
    request._blocks = len(entry.cache_engine.block_table) if cached else 0


def check(policy: Policy, schedule: Any) -> None:
    """Reject policies and servers that would fail at the first request."""
    Adapter(policy)
    if not hasattr(schedule, "_continuous_batch_pa"):
        raise BadInput(
            "adapter: Schedule has no _continuous_batch_pa; expected llm-serving 7342f33 or a similar version"
        )
    if getattr(policy, "delay_variant", "") == "contest-as-reported" and not getattr(policy, "fix_delay_bugs", True):
        raise BadInput("delay_variant: contest-as-reported crashes on an empty queue; set fix_delay_bugs")


def install() -> None:
    """Let the policy of the environment fill the slots of the server in this process.

    With several prompts per prefill, also repair the server.
    """
    policy = make_policy(*fields_from(os.environ.get(POLICY_VARIABLE, "{}"), "llm-serving"))
    schedule, master = server_module("schedule.schedule").Schedule, server_module("master.master").AsyncMaster
    check(policy, schedule)
    grouped = getattr(policy, "prefill_batch", 1) > 1
    if grouped:
        if not hasattr(master, "_check_prompt_predict_data_pa"):
            raise BadInput("adapter: AsyncMaster has no _check_prompt_predict_data_pa; set prefill_batch to 1")
        install_repair()
    adapters: WeakKeyDictionary[Any, Adapter] = WeakKeyDictionary()  # one per schedule; a server has one schedule
    last: list[Adapter] = []

    def fill(self: Any) -> None:
        adapter = adapters.get(self)
        if adapter is None:
            adapter = adapters[self] = Adapter(policy)
            # Not a log record: the server's scripts log errors only.
            print(f"servesim now schedules {self.batch_size} slots: {policy}", file=sys.stderr, flush=True)
        last[:] = [adapter]
        adapter.fill_slots(self)

    def queue_len(self: Any) -> int:
        return len(self.waiting_request_queue) + (len(adapters[self].swapped) if self in adapters else 0)

    def prompts(entries: Any) -> tuple[list[Any], list[int]]:
        slots = last[0].prompts if last else []
        return [entries[slot] for slot in slots], slots

    schedule._continuous_batch_pa = fill
    schedule.get_queue_len = queue_len
    if grouped:
        master._check_prompt_predict_data_pa = staticmethod(prompts)

"""One of our policies inside the real llm-serving: its paged scheduling decides by our rule, on its blocks and slots.

The server stays as it is; only the function that fills its slots is replaced. Its state is read again on every call:
what waits, what sits in which slot, which blocks are held. What the server does not have, a queue of its own for
evicted requests and a policy's memory, is kept here. Python 3.9, standard library, servesim's core and policies.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import time
from collections import deque
from operator import attrgetter
from typing import Any, Callable, Optional
from weakref import WeakKeyDictionary

from servesim.core import BadInput, BlockPool, Chunk, Eviction, Plan, Policy, Request, View, traits_of
from servesim.engine.cohort import Cohort
from servesim.engine.queues import FifoQueue, RequestQueue, SortedQueue
from servesim.policies import POLICIES

LIVE = ("RUNNING", "INPUT_OUTOFRANGE")  # statuses of slots that are taken
SETTING = "SERVESIM_POLICY"  # environment: {"name": ..., fields...}
SEVERAL = "SERVESIM_MULTI_PREFILL"  # environment: 1 if the agent has been mended for several prompts in a call


class Adapter:
    """A policy and what it remembers between two looks at the server."""

    def __init__(self, policy: Policy, clock: Callable[[], float] = time.perf_counter) -> None:
        if traits_of(policy).running_order != "slot" or getattr(policy, "strategy", "paged") != "paged":
            raise BadInput("adapter: llm-serving has slots and pages; expected a policy of the llm-serving family")
        self.policy = policy
        self.clock = clock
        self.memory: Any = policy.begin()
        self.swapped: deque[Any] = deque()  # entries evicted to a queue of their own
        self.prompts: list[int] = []  # slots whose prompts the next call runs
        self._promoted: list[Request] = []  # waiting before all others since they were late, in that order
        self._requests: WeakKeyDictionary[Any, Request] = WeakKeyDictionary()
        self._serial = 0
        self._prefill: Optional[float] = None  # when the prompt in flight was begun
        self._last_prefill: Optional[tuple[float, float]] = None

    def fill(self, schedule: Any) -> None:
        """Fill a schedule's slots: what `_continuous_batch_pa` does in the stock server."""
        if getattr(self.policy, "decode_batch", None) != schedule.batch_size:  # the server's setting, or its gear
            self.policy = self.policy.but(decode_batch=schedule.batch_size)
        schedule.try_initialize_paddings_pa()
        now = self.clock()
        if self._prefill is not None:
            self._last_prefill, self._prefill = (self._prefill, now), None
        view, entries = self.read(schedule, now)
        plan = self.policy.decide(view)
        self.memory = plan.memory
        self.carry_out(plan, schedule, entries)
        self.prompts = sorted(self._slot(chunk, schedule, entries) for chunk in plan.chunks)
        if plan.chunks:
            self._prefill = now

    def read(self, schedule: Any, now: float) -> tuple[View, dict[Request, Any]]:
        """Return what a policy may know of the server, and the entry of each request."""
        slots = schedule.running_request_list
        cache = slots[0].cache_engine
        pool = BlockPool(cache.pool.num_blocks + len(cache.pool.used_blocks) - 1, cache.block_size)
        pool.free = len(cache.pool.free_blocks)
        cohort = Cohort(cache.block_size)
        entries: dict[Request, Any] = {}
        waiting, swapped, finished = self._waiting(), FifoQueue(), FifoQueue()
        running, prefilling = SortedQueue(attrgetter("slot")), SortedQueue(attrgetter("slot"))
        for slot, entry in enumerate(slots):
            if live(entry):
                request = self._request(entry, now)
                entries[request] = entry
                update(request, entry, "running", slot)
                running.push(request)
                if entry.is_prompt:
                    prefilling.push(request)
                else:
                    cohort.join(request)
        self._line_up(schedule.waiting_request_queue, waiting, "waiting", now, entries)
        self._line_up(self.swapped, swapped, "swapped", now, entries)
        self._promote(waiting, now)
        view = View(waiting, running, swapped, prefilling, finished, pool, cohort, schedule.max_input_len)
        view.now, view.memory, view.last_prefill = now, self.memory, self._last_prefill
        return view, entries

    def _waiting(self) -> RequestQueue:
        return SortedQueue(self._rank) if self.policy.ranked else FifoQueue()

    def _rank(self, request: Request) -> Any:
        return self.policy.rank(request), request.arrival, request.serial

    def _line_up(self, source: Any, queue: Any, place: str, now: float, entries: dict[Request, Any]) -> None:
        for entry in source:
            request = self._request(entry, now)
            entries[request] = entry
            update(request, entry, place)
            queue.push(request)

    def _promote(self, waiting: Any, now: float) -> None:
        """Put requests in front that have waited for more than max_wait, behind those put there before."""
        patience = self.policy.max_wait
        if patience is None or not isinstance(waiting, SortedQueue):
            return
        here = set(waiting)
        still = [request for request in self._promoted if request in here]
        late = [request for request in here.difference(still) if request.arrival + patience <= now]
        self._promoted = still + sorted(late, key=lambda request: (request.arrival, request.serial))
        for request in self._promoted:
            waiting.move_to_front(request)

    def _request(self, entry: Any, now: float) -> Request:
        """Return the request an entry is known as; it arrived when it was first seen."""
        request = self._requests.get(entry)
        if request is None:
            data = entry.get_entry_data()
            limit = data.get_max_token_len()
            request = Request(entry.request_id, now, data.get_prompt_len(), max(1, limit), limit)
            request.serial, self._serial = self._serial, self._serial + 1
            self._requests[entry] = request
        return request

    def carry_out(self, plan: Plan, schedule: Any, entries: dict[Request, Any]) -> None:
        """Do to the server what a plan says; the model call itself stays the server's."""
        for eviction in plan.moves.evict:
            self._evict(eviction, schedule, entries[eviction.request])
        for request in plan.moves.admit:
            self._admit(schedule, entries[request])
        for chunk in plan.chunks:  # a first chunk admits, too
            if chunk.request.place != "running" and chunk.request not in plan.moves.admit:
                self._admit(schedule, entries[chunk.request])

    def _evict(self, eviction: Eviction, schedule: Any, entry: Any) -> None:
        """Take an entry out of its slot: its cache is dropped, what it wrote is kept."""
        data = entry.get_entry_data()
        slot = schedule.running_request_list.index(entry)
        logging.warning("evicted %s from slot %s", entry.request_id, slot)
        data.set_status(type(data.get_status())["WAITING"])
        data.set_decode_index(0)
        entry.is_prompt = True
        entry.cache_engine.release_cache()
        if eviction.request in self._promoted:
            self._promoted.remove(eviction.request)
        if eviction.to == "swapped":
            self.swapped.append(entry)
        elif eviction.to == "ranked" and not self.policy.ranked:
            schedule.waiting_request_queue.append(entry)
        else:  # a sorted queue takes it anywhere
            schedule.waiting_request_queue.appendleft(entry)
        schedule.insert_padding_entry(slot)

    def _admit(self, schedule: Any, entry: Any) -> None:
        """Let the server put an entry into the first free slot, from the head of its queue, where it takes them."""
        queue = self.swapped if entry in self.swapped else schedule.waiting_request_queue
        queue.remove(entry)
        schedule.waiting_request_queue.appendleft(entry)
        free = next(slot for slot, other in enumerate(schedule.running_request_list) if not live(other))
        schedule._insert_new_prompt_to_batch_pa(free)

    def _slot(self, chunk: Chunk, schedule: Any, entries: dict[Request, Any]) -> int:
        request, tokens, _ = chunk
        assert tokens == request.prompt + request._written, "llm-serving runs whole prompts"
        slot: int = schedule.running_request_list.index(entries[request])
        return slot


def live(entry: Any) -> bool:
    """Say whether a slot is taken."""
    return entry.get_entry_data().get_status().name in LIVE


def update(request: Request, entry: Any, place: str, slot: Optional[int] = None) -> None:
    """Bring a request up to its entry, which sits in a slot or waits in a queue."""
    cached = slot is not None and not entry.is_prompt
    request.place, request.slot, request._cohort = place, slot, None
    request._written = entry.get_entry_data().get_output_len()
    request._cached = entry.cache_engine.num_token if cached else 0
    request._held = len(entry.cache_engine.block_table) if cached else 0


def policy_from(text: str) -> Policy:
    """Read a policy as {"name": ..., fields...}."""
    try:
        fields = dict(json.loads(text))
    except (ValueError, TypeError):
        raise BadInput(f'{SETTING}: expected a JSON object such as {{"name": "llm-serving"}}, got {text!r}') from None
    name = fields.pop("name", "llm-serving")
    if name not in POLICIES:
        raise BadInput(f"{SETTING}: no policy {name!r}; known: {', '.join(POLICIES)}")
    try:
        return POLICIES[name](**fields)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{SETTING}: {error}") from None


def check(policy: Policy, schedule: Any) -> None:
    """Refuse, before the first request, what would fail at it."""
    Adapter(policy)
    if not hasattr(schedule, "_continuous_batch_pa"):
        raise BadInput("adapter: this llm-serving's Schedule has no _continuous_batch_pa; expected 7342f33 or near it")
    if getattr(policy, "prefill_batch", 1) > 1 and os.environ.get(SEVERAL) != "1":
        why = "the stock agent stores the tokens of several prompts in wrong places"
        raise BadInput(f"prefill_batch: {why}; mend it, then set {SEVERAL}=1")
    if getattr(policy, "delay_variant", "") == "contest-as-reported" and not getattr(policy, "mend_delay", True):
        raise BadInput("delay_variant: contest-as-reported dies on an empty queue, as reported; set mend_delay")


def install(policy: Optional[Policy] = None, schedule: Any = None, master: Any = None) -> None:
    """Replace the paged scheduling of a Schedule class; without arguments, of the server in this process."""
    if policy is None:
        policy = policy_from(os.environ.get(SETTING, "{}"))
    if schedule is None:
        schedule = importlib.import_module("mindspore_serving.schedule.schedule").Schedule
        master = importlib.import_module("mindspore_serving.master.master").AsyncMaster
    check(policy, schedule)
    wanted = policy
    adapters: WeakKeyDictionary[Any, Adapter] = WeakKeyDictionary()  # one a schedule; a server has one
    last: list[Adapter] = []

    def fill(self: Any) -> None:
        adapter = adapters.get(self)
        if adapter is None:
            adapter = adapters[self] = Adapter(wanted)
            logging.warning("servesim schedules %s slots from here on: %s", self.batch_size, wanted)
        last[:] = [adapter]
        adapter.fill(self)

    def queue_len(self: Any) -> int:
        return len(self.waiting_request_queue) + (len(adapters[self].swapped) if self in adapters else 0)

    def prompts(entries: Any) -> tuple[list[Any], list[int]]:
        slots = last[0].prompts if last else []
        return [entries[slot] for slot in slots], slots

    schedule._continuous_batch_pa = fill
    schedule.get_queue_len = queue_len
    if getattr(policy, "prefill_batch", 1) > 1:
        master._check_prompt_predict_data_pa = staticmethod(prompts)

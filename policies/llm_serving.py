"""MindSpore llm-serving: fixed slots, prefill first and one at a time, the shortest entry evicted to the front.

The defaults are the stock server's rule; the other fields are what later entries of its contest changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import merge
from itertools import chain
from typing import Any, Optional

from servesim.core import FOREVER, Chunk, Eviction, Plan, Policy, Queue, Request, Traits, View, at_least, one_of

from .common import DECODE, REST
from .llm_serving_delay import Gate, Turnstile
from .llm_serving_static import affordable, decide_rows, is_out_of_range, refused

VICTIMS = ("shortest", "longest", "newest", "oldest", "fewest-blocks")


def victim_key(victim: str, request: Request) -> float:
    """Return the key of the entry to evict, smallest first; ties go to the lowest slot, as in the real scan."""
    if victim == "fewest-blocks":
        return request.blocks
    if victim in ("newest", "oldest"):
        return request.arrival if victim == "oldest" else -request.arrival
    return request.length if victim == "shortest" else -request.length


@dataclass(frozen=True)
class LLMServing(Policy):
    """MindSpore llm-serving's scheduler and the knobs its users turned."""

    decode_batch: int = 1  # slots: requests that run at once, and the rows every decode is padded to
    prefill_batch: int = 1  # prompts of one prefill step; stock runs 1 whatever its setting says
    delay_factor: float = 0.0  # admit once the oldest has waited so many times the last prefill's latency
    delay_variant: str = "none"  # who must have waited: none, queue, request, contest, contest-as-reported
    mend_delay: bool = False  # mend the contest variants' two flaws: death on an empty queue, waiting while idle
    evicted: str = "front"  # where evicted requests go: front (of waiting), ranked (by order), swapped (a queue)
    serve_first: str = "swapped"  # which queue fills a free slot: swapped, waiting, older (of the two heads)
    victim: str = "shortest"  # who is evicted: shortest, longest, newest, oldest, fewest-blocks
    open_above: int = 0  # hysteresis: admit only once more slots than this are free, until all are taken; 0 is off
    strategy: str = "paged"  # paged; without PagedAttention and memory: continuous, static; with: static-paged

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "decode_batch", "prefill_batch")
        at_least(self, 0, "delay_factor", "open_above")
        one_of(
            self,
            delay_variant=("none", "queue", "request", "contest", "contest-as-reported"),
            evicted=("front", "ranked", "swapped"),
            serve_first=("swapped", "waiting", "older"),
            victim=VICTIMS,
            strategy=("paged", "continuous", "static", "static-paged"),
        )

    @property
    def traits(self) -> Traits:
        return Traits(
            engine="MindSpore llm-serving 7342f33 (2024-05-24), and its contest's entries",
            validated_against="recordings of the real scheduler, master and worker: 14 cases, 60 random ones; "
            "a second telling of its rules on 2,400 random cases",
            running_order="slot",
            reserved_blocks=1,  # block 0
            rejects_oversized=False,  # the real one livelocks on what does not fit
        )

    @property
    def paged(self) -> bool:
        return self.strategy.endswith("paged")

    def begin(self) -> Any:
        if self.strategy != "paged":
            return ()
        return Gate() if self.delay_factor or self.open_above else None

    def decide(self, view: View) -> Plan:
        if self.strategy != "paged":
            return self._rows(view)
        pool, prompts = view.pool, view.prefilling
        budget = pool.free - view.cohort.need()
        if prompts:
            budget -= sum(pool.blocks(request.length) for request in prompts)
        if budget < 0:
            return self._evict(view, pool.free - budget)
        if view.memory is not None:
            admit, gate, wake = self._admissions(view, budget)
        else:  # no gate stands before the queues
            if not (prompts or view.swapped):
                if not view.waiting:
                    return DECODE if view.cohort.size else REST
                chunks = self._whole(view, budget)
                if chunks:
                    return Plan(chunks=chunks)
            admit, gate, wake = self._fill(view, budget), None, None
        queue: Queue = prompts
        if admit:
            queue = self._by_slot(view, admit) if prompts else admit
        return self._call(view, queue, view.cohort.size, admit, (), gate, wake)

    def _rows(self, view: View) -> Plan:
        if self.strategy == "static-paged":  # prompts run one by one, as always with PagedAttention
            return affordable(decide_rows(view, self.decode_batch, 1, True), view)
        return decide_rows(view, self.decode_batch, self.prefill_batch, self.strategy == "static")

    def _evict(self, view: View, need: int) -> Plan:
        """Make room; the survivors go on, and nobody is admitted in the same step."""
        evict = self._victims(view, need)
        gone = {eviction.request for eviction in evict}
        prompts = [request for request in view.prefilling if request not in gone]
        left = view.decoding - sum(request.decodes for request in gone)
        return self._call(view, prompts, left, (), evict, view.memory, None)

    def _call(
        self, view: View, prompts: Queue, decoding: int, admit: Sequence[Request],
        evict: Sequence[Eviction], memory: Optional[Gate], wake: Optional[float],
    ) -> Plan:  # fmt: skip
        """Choose the model call: errors are answered first, then prompts run, and decodes only when none is left."""
        longest = view.max_model_len
        chunks: list[Chunk] = []
        for request in prompts:
            if is_out_of_range(request, longest):
                reject = refused(prompts, longest)
                return Plan(evict=evict, admit=admit, reject=reject, memory=memory, wake=wake)
            if len(chunks) < self.prefill_batch:
                chunks.append(Chunk(request, request.prompt + request.written))
        if not chunks:
            hold = 0 if evict or not decoding else FOREVER
            return Plan(evict=evict, admit=admit, decode=decoding > 0, hold=hold, memory=memory, wake=wake)
        if len(chunks) == len(prompts) and not view.prefilling:
            admit = ()  # a chunk admits by itself, in the same order
        return Plan(evict=evict, admit=admit, chunks=chunks, memory=memory, wake=wake)

    def _victims(self, view: View, need: int) -> list[Eviction]:
        """Evict until all that is left fits its next step."""
        pool, free = view.pool, view.pool.free
        live = list(view.running)
        evict = []
        while need > free:
            victim = min(live, key=partial(victim_key, self.victim))
            live.remove(victim)
            evict.append(Eviction(victim, "recompute", self.evicted))
            free += victim.blocks
            need -= pool.blocks(victim.cached + 1) - victim.blocks if victim.decodes else pool.blocks(victim.length)
        return evict

    def _admissions(self, view: View, budget: int) -> tuple[list[Request], Optional[Gate], Optional[float]]:
        """Fill free slots from the queues, strictly from their heads."""
        slots = self.decode_batch - len(view.running)
        gate: Gate = view.memory
        if self.open_above:
            if slots > self.open_above:
                gate = gate._replace(open=True)
            slots = slots if gate.open else 0
        admit: list[Request] = []
        wake = None
        passes = Turnstile(self.delay_factor, self.delay_variant, self.mend_delay, view, gate)
        for request in self._heads(view):
            if slots <= 0:
                break
            if request.place == "waiting" and not passes.lets():
                wake = passes.opens
                break
            blocks = view.pool.blocks(request.length)
            if blocks > budget:
                break
            budget -= blocks
            slots -= 1
            admit.append(request)
            passes.admitted(request)
        gate = passes.gate
        if self.open_above and slots <= 0:
            gate = gate._replace(open=False)
        return admit, gate, wake

    def _whole(self, view: View, budget: int) -> list[Chunk]:
        """Return the prompts of all who get a slot, if one call takes them and nobody is refused: the usual turn."""
        size, slots = view.pool.size, self.decode_batch - len(view.running)
        longest = FOREVER if view.max_model_len is None else view.max_model_len
        chunks: list[Chunk] = []
        for request in view.waiting:
            tokens = request.prompt + request.written
            budget -= -(-tokens // size)
            if budget < 0 or len(chunks) == slots:
                break
            if len(chunks) == self.prefill_batch or request.prompt + request.limit >= longest:
                return []
            chunks.append(Chunk(request, tokens))
        return chunks

    def _fill(self, view: View, budget: int) -> list[Request]:
        """Fill free slots where no gate stands before the queues."""
        admit: list[Request] = []
        size, slots = view.pool.size, self.decode_batch - len(view.running)
        for request in self._heads(view):
            budget -= -(-(request.prompt + request.written) // size)
            if budget < 0 or len(admit) == slots:
                break
            admit.append(request)
        return admit

    def _heads(self, view: View) -> Iterator[Request]:
        """Return the queues in the order they are served."""
        if not view.swapped:
            return iter(view.waiting)
        if self.serve_first == "older":
            return merge(view.swapped, view.waiting, key=lambda request: request.arrival)
        if self.serve_first == "waiting":
            return chain(view.waiting, view.swapped)
        return chain(view.swapped, view.waiting)

    def _by_slot(self, view: View, admit: list[Request]) -> list[Request]:
        """Merge the prompts already in slots with those that will take the lowest free ones."""
        taken = {request.slot for request in view.running}
        free = (slot for slot in range(self.decode_batch) if slot not in taken)
        slots = dict(zip(admit, free))
        slots.update((request, request.slot or 0) for request in view.prefilling)
        return sorted(slots, key=lambda request: slots[request])

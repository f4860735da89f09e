"""What both schedulers of vLLM v0 share: their memory tests, who is preempted, who comes back from the host.

`length` is prompt and answer so far; a decode of it needs blocks for `length`, the newest token having no cache yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.core import BlockPool, Eviction, Policy, Queue, Rejection, Request, Stuck, Traits, View, at_least, one_of

from .delay_gate import SCOPES, DelayGate, Timers


class Room:
    """Memory while a step is put together, and who had to make room."""

    def __init__(self, view: View, free: Optional[int] = None) -> None:
        self.view = view
        self.free = view.pool.free if free is None else free
        self.host = view.pool.host_free
        self.evict: list[Eviction] = []


class SwapIns(NamedTuple):
    """What the pass over the swapped requests came to."""

    back: Sequence[Request] = ()
    failed: Sequence[Rejection] = ()


@dataclass(frozen=True)
class VLLMv0(Policy):
    """The fields and rules that vLLM v0's two schedulers have in common; the defaults are 0.8.5's."""

    max_num_seqs: int = 256  # requests that run at once; swapped ones do not count
    watermark: float = 0.01  # share of the blocks that an admission or a swap-in must leave free
    delay_factor: float = 0.0  # prompts wait for so many times the last prefill's latency (scheduler_delay_factor)
    delay_scope: str = "request-unless-idle"  # who waits: request (0.4.0), queue (-0.5.3), request-unless-idle (later)
    preemption_mode: Optional[str] = None  # recompute or swap (to host blocks); None recomputes
    sort_running: bool = False  # keep the batch sorted by arrival (<= 0.5.3) instead of as it came
    swap_order: str = "swapped"  # who comes back first: arrival (<= 0.5.3: the oldest) or swapped (first out, first in)
    append_rule: str = "touched"  # block manager: any_free (v1, < 0.6.3) or touched (selfattn: counts touched blocks)
    fail_infeasible: bool = True  # a swapped request larger than the whole memory fails (>= 0.4.1), or waits forever

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "max_num_seqs")
        at_least(self, 0, "delay_factor", "watermark")
        below_one(self.watermark)
        one_of(self, delay_scope=SCOPES, preemption_mode=(None, "recompute", "swap"))
        one_of(self, swap_order=("arrival", "swapped"), append_rule=("any_free", "touched"))

    @property
    def traits(self) -> Traits:
        # The scheduler itself drops ("ignores") what can never fit, when its turn comes.
        return Traits(rejects_oversized=False)

    def begin(self) -> Any:
        return Timers() if self.delay_factor > 0 else None

    def gate(self, view: View) -> Optional[DelayGate]:
        """Return the delay gate, its clock read, or None where there is no delay."""
        return DelayGate(self.delay_factor, self.delay_scope, view, view.memory) if self.delay_factor > 0 else None

    def reserve(self, pool: BlockPool) -> int:
        """Blocks that an admission must leave free."""
        return int(self.watermark * pool.total)

    def grow(self, room: Room, request: Request, behind: deque[Request]) -> bool:
        """Make room for a running request, the last behind it giving way; say whether it could stay itself."""
        pool = room.view.pool
        spare = self.append_rule == "touched" and not request.decodes and request.length % pool.size == 0
        while room.free < (0 if spare else 1):  # even if its last block has room
            victim = behind.pop() if behind else request
            self._preempt(room, victim)
            if victim is request:
                return False
        room.free -= pool.blocks(request.length) - request.blocks
        return True

    def _preempt(self, room: Room, request: Request) -> None:
        view, blocks = room.view, request.blocks
        room.free += blocks
        if self.preemption_mode != "swap":
            room.evict.append(Eviction(request))
            return
        need = blocks if self.append_rule == "any_free" else view.pool.blocks(request.length)
        if need > room.host:
            why = f"the engine dies: {need} host blocks to swap out request {request.id}, {room.host} are free"
            raise Stuck(why, [*view.running, *view.swapped, *view.waiting], view.now)
        room.host -= blocks
        room.evict.append(Eviction(request, "swap", "swapped"))

    def swap_ins(self, view: View, free: int, seats: int, tokens: int) -> SwapIns:
        """Return who comes back from the host, given free blocks, seats and tokens of the step."""
        if not view.swapped:
            return SwapIns()
        pool, reserve = view.pool, self.reserve(view.pool)
        queue = view.swapped if self.swap_order == "swapped" else sorted(view.swapped, key=lambda r: r.arrival)
        back: list[Request] = []
        failed: list[Rejection] = []
        for request in queue:
            blocks = pool.blocks(request.length)
            need = request.host + 1 if self.append_rule == "any_free" else blocks
            if self.fail_infeasible and need > pool.total:
                failed.append(Rejection(request, f"needs {need} blocks to come back, the pool has {pool.total}"))
                continue
            if free - need < reserve or seats < 1 or request.pending > tokens:  # a swap-in is never chunked
                break
            free -= max(request.host, blocks)
            seats -= 1
            tokens -= request.pending
            back.append(request)
        return SwapIns(back, failed)


def below_one(watermark: float) -> None:
    """Check a watermark; its lower bound is checked with the other fields."""
    if watermark >= 1:
        raise ValueError(f"watermark: expected a share below 1, got {watermark!r}")


def by_priority(request: Request) -> tuple[int, float]:
    """Return the key of the priority policy: the smaller number first, then the older."""
    return (request.priority, request.arrival)


def ends_with(running: Queue, prefilling: Queue) -> bool:
    """Say whether the half-done prompts stand at the end of the batch."""
    first = len(running) - len(prefilling)
    return all(running[first + place] is request for place, request in enumerate(prefilling))

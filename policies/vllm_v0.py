"""What both schedulers of vLLM v0 share: their memory tests, who is preempted, who comes back from the host.

`length` is prompt and answer so far; a decode of it needs blocks for `length`, the newest token having no cache yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Optional, Sequence

from ..core import BlockPool, Eviction, Policy, Rejection, Request, Stuck, View, at_least, one_of
from .delay_gate import SCOPES, DelayGate, Timers


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
    delay_scope: str = "request-unless-idle"  # who must have waited: queue (0.4.1-0.5.3), request (0.4.0), request-unless-idle
    preemption_mode: Optional[str] = None  # recompute or swap (to host blocks); None recomputes
    sort_running: bool = False  # keep the batch sorted by arrival (<= 0.5.3) instead of as it came
    swap_order: str = "swapped"  # who comes back first: arrival (<= 0.5.3: the oldest) or swapped (first out, first in)
    append_rule: str = "touched"  # block manager: any_free (v1, < 0.6.3) or touched (selfattn: counts touched blocks)
    fail_infeasible: bool = True  # a swapped request larger than the whole memory fails (>= 0.4.1), or waits forever

    refuses: ClassVar[bool] = False  # the scheduler itself drops ("ignores") what can never fit, when its turn comes

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "max_num_seqs")
        at_least(self, 0, "delay_factor", "watermark")
        if self.watermark >= 1:
            raise ValueError(f"watermark: expected a share below 1, got {self.watermark!r}")
        one_of(
            self,
            delay_scope=SCOPES,
            preemption_mode=(None, "recompute", "swap"),
            swap_order=("arrival", "swapped"),
            append_rule=("any_free", "touched"),
        )

    def begin(self) -> Any:
        return Timers() if self.delay_factor > 0 else None

    def gate(self, view: View) -> Optional[DelayGate]:
        """Return the delay gate, its clock read, or None where there is no delay."""
        return DelayGate(self.delay_factor, self.delay_scope, view, view.memory) if self.delay_factor > 0 else None

    def reserve(self, pool: BlockPool) -> int:
        """Blocks that an admission must leave free."""
        return int(self.watermark * pool.total)

    def preempt(self, view: View, request: Request, host: int) -> Eviction:
        """Return how a victim is preempted, so many host blocks being free."""
        if self.preemption_mode != "swap":
            return Eviction(request)
        need = request.blocks if self.append_rule == "any_free" else view.pool.blocks(request.length)
        if need > host:
            why = f"no host memory to swap out request {request.id} ({need} blocks, {host} free); the engine is dead"
            raise Stuck(why, [*view.running, *view.swapped, *view.waiting], view.now)
        return Eviction(request, "swap", "swapped")

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
            if free - need < reserve or not seats or request.pending > tokens:  # a swap-in is never chunked
                break
            free -= max(request.host, blocks)
            seats -= 1
            tokens -= request.pending
            back.append(request)
        return SwapIns(back, failed)

    def grows(self, pool: BlockPool, request: Request) -> int:
        """Blocks that must be free for a running request to go on, whether it takes them or not."""
        if self.append_rule == "touched" and not request.decodes and request.length % pool.size == 0:
            return 0
        return 1


def takes(pool: BlockPool, request: Request) -> int:
    """Blocks that a running request takes in its next step: a half-done prompt has all of its own already."""
    return pool.blocks(request.length) - request.blocks

"""SGLang: prefill first. Admission reserves a fraction of the future output tokens; the fraction adapts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from servesim.core import (
    FOREVER,
    PAST_FINISH,
    UNTIL_FINISH,
    BlockPool,
    Hold,
    Plan,
    Preemption,
    Reorder,
    Request,
    Values,
    View,
)
from servesim.core.native import mypyc_attr

from .prefill import CACHE_ORDERS, NOTHING_TRIED, PrefillAdder, SGLangSettings, Tried, known_length, out_of_memory
from .rules import Ended, SGLangRules


class SGLangState(Values):
    """Policy state: what SGLang keeps from one turn to the next."""

    __slots__ = (
        "batch_is_full", "batch_is_new", "decodes_left", "dropped", "new_token_ratio", "rows_after_prefill", "was_idle",
    )  # fmt: skip

    def __init__(
        self,
        new_token_ratio: float,
        batch_is_full: bool = False,
        rows_after_prefill: int = -1,
        batch_is_new: bool = False,
        dropped: int = 0,
        was_idle: bool = False,
        decodes_left: int = 0,
    ) -> None:
        self.new_token_ratio = new_token_ratio  # fraction of the future output tokens that admissions reserve
        self.batch_is_full = batch_is_full  # of the running batch: no admission is tried
        # requests in the running batch after the last step, if none finishes; -1: it was no prefill
        self.rows_after_prefill = rows_after_prefill
        self.batch_is_new = batch_is_new  # the last step was a prefill, and its batch becomes the running batch
        self.dropped = dropped  # the oldest of view.engine that have left the batch; -1: all that are there next time
        self.was_idle = was_idle  # the last turn had no batch
        self.decodes_left = decodes_left  # turns until a prefill may follow the last one (prefill_decode_interval)

    def values(self) -> tuple[Any, ...]:
        return (
            self.new_token_ratio, self.batch_is_full, self.rows_after_prefill, self.batch_is_new, self.dropped,
            self.was_idle, self.decodes_left,
        )  # fmt: skip


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class SGLang(SGLangSettings):
    """The scheduler of SGLang. `engine.block_size` is its page size, 1 by default."""

    def rules(self) -> SGLangRules:
        depth = 1 if self.disable_overlap_schedule else 2
        rules = SGLangRules(self.version, self.is_old, not self.disable_radix_cache, depth)
        rules.slots_field, rules.budget_fields = "max_running_requests", ("chunked_prefill_size",)
        if self.chunked_prefill_size is None or self.max_prefill_tokens < self.chunked_prefill_size:
            rules.budget_fields = ("max_prefill_tokens",)
        return rules

    def engine_refusals(self, block_size: int, max_model_len: Optional[int]) -> list[str]:
        size, refusals = self.chunked_prefill_size, []
        if size is not None and size % block_size:
            refusals.append(f"chunked_prefill_size ({size}) is no multiple of engine.block_size ({block_size})")
        if self.is_old and self.disable_radix_cache and self.schedule_policy in CACHE_ORDERS:
            refusals.append(f"schedule_policy {self.schedule_policy} needs the radix cache")  # 0.5.18 uses fcfs
        return refusals

    @property
    def is_sorted(self) -> bool:
        return self.schedule_policy == "lof" or super().is_sorted

    def sort_key(self, request: Request) -> Any:
        key = super().sort_key(request)
        return (-request.max_tokens, key) if self.schedule_policy == "lof" else key

    def max_output(self, prompt: int, pool: BlockPool, max_model_len: Optional[int]) -> int:
        tokens = pool.total * pool.block_size
        context = tokens if max_model_len is None else min(tokens, max_model_len)
        if prompt >= context - 6:
            return -1
        if self.is_old:
            return context - prompt - 2
        return min(context - prompt - 2, (pool.total - pool.blocks_for(prompt) - 1) * pool.block_size - 1)

    @property
    def first_ratio(self) -> float:
        """The new_token_ratio at the start, and after the engine was idle."""
        return min(self.init_new_token_ratio * self.schedule_conservativeness, 1.0)

    def initial_state(self) -> Any:
        return SGLangState(self.first_ratio)

    def held_state(self, state: Any, now: float) -> Any:
        old: SGLangState = state
        return SGLangState(
            self._decay(old.new_token_ratio), old.batch_is_full, decodes_left=max(old.decodes_left - 1, 0)
        )

    def _decay(self, ratio: float) -> float:
        """Return the new_token_ratio after a decode step."""
        first = self.first_ratio
        minimum = first * self.min_new_token_ratio_factor
        return max(ratio - (first - minimum) / self.new_token_ratio_decay_steps, minimum)

    def decide(self, view: View) -> Plan:
        state: SGLangState = view.state
        finished: Ended = view.engine or []
        dropped = len(finished) if state.dropped < 0 else state.dropped
        ended = len(finished) - dropped
        full, wait = state.batch_is_full, state.decodes_left
        tried = NOTHING_TRIED
        if full and state.rows_after_prefill >= 0:
            shrank = view.decoding + ended < state.rows_after_prefill
            full = not (view.prefilling or shrank or (state.batch_is_new and view.decoding))
        if wait:
            wait -= 1
        elif view.prefilling or (view.waiting and not full):
            adder = PrefillAdder(self, view, state.new_token_ratio, finished[:ended], full)
            adder.fill()
            full, tried = adder.full, adder.tried
            if adder.chunks:
                return self._prefill(view, adder, dropped)
        if not view.decoding:
            return self._idle(view, full and not ended, wait, tried)
        needed = self._decode_room(view)
        if needed > view.pool.free + view.pool.evictable:
            return self._retract(view, wait, needed, tried)
        full = full and not ended
        waits = bool(view.waiting or view.prefilling) and not full
        hold = UNTIL_FINISH if full else PAST_FINISH
        keep_free = view.decoding if self.is_old and view.pool.block_size > 1 else 0
        if waits or keep_free:
            hold = Hold(wait if waits else FOREVER, keep_free, not full)
        state = SGLangState(self._decay(state.new_token_ratio), full, decodes_left=wait)
        return Plan(
            decode=True, hold=hold, state=state, reorder=tried.reorder(),
            extra=tried.cache_use(needed if needed > view.pool.free else 0),
        )  # fmt: skip

    def _prefill(self, view: View, adder: PrefillAdder, dropped: int) -> Plan:
        """Return the plan of a prefill, or of a mixed step."""
        state: SGLangState = view.state
        mixed = self.enable_mixed_chunk
        decode = mixed and view.decoding > 0
        adder.check_memory(decode)
        rows = view.decoding if mixed else adder.rows
        after = SGLangState(
            state.new_token_ratio,
            adder.full,
            rows_after_prefill=rows + len(adder.chunks) - adder.continues,
            batch_is_new=mixed or not rows,
            dropped=-1 if mixed else dropped,
            decodes_left=self.prefill_decode_interval,
        )
        order = None
        if decode:  # the decodes stand behind the prompts, in the batch and from now on
            prompts = [chunk.request for chunk in adder.chunks]
            order = [*prompts, *(request for request in view.running if request.decodes)]
        return Plan(
            chunks=adder.chunks, decode=decode, reorder=adder.tried.reorder(order), state=after,
            extra=adder.tried.cache_use(),
        )  # fmt: skip

    def _idle(self, view: View, full: bool, wait: int, tried: Tried) -> Plan:
        """Return the plan of a turn in which nothing runs."""
        state: SGLangState = view.state
        is_idle = self.disable_overlap_schedule or state.was_idle  # otherwise the last batch may still run
        if is_idle and (self.is_old or not (view.waiting or view.prefilling)):
            state = SGLangState(self.first_ratio)
        state = SGLangState(
            state.new_token_ratio, full, dropped=len(view.engine or []), was_idle=True, decodes_left=wait
        )
        return Plan(state=state, reorder=tried.reorder(), extra=tried.cache_use())

    def _decode_room(self, view: View) -> int:
        """Return the blocks that SGLang asks for before a decode. 0.4.6 counts tokens that it knows, also the last."""
        pool = view.pool
        if not self.is_old:
            return view.decode_block_need
        needed, available = view.cohort.blocks_needed(1), pool.free + pool.evictable
        if not self.disable_overlap_schedule and pool.block_size > 1:
            needed = sum([known_length(r) % pool.block_size == 0 for r in view.running if r.decodes])
        if needed <= available < view.decode_block_need:
            raise out_of_memory("Decode", view)
        return needed

    def _retract(self, view: View, wait: int, make_room: int, tried: Tried) -> Plan:
        """Preempt requests with the fewest generated tokens, at least one, until those left can decode."""
        pool, steps = view.pool, self.retract_decode_steps
        kept = [request for request in view.running if request.decodes]
        kept.sort(key=lambda request: (known_length(request) - request.prompt, -request.prompt), reverse=True)
        preempt: list[Preemption] = []
        free, cache = pool.free + pool.evictable, view.prefix_cache
        if cache is not None:
            cache.start()
        while len(kept) > 1:
            needed = pool.blocks_for(steps * len(kept)) if self.is_old else decode_need(kept, pool)
            if preempt and free >= needed:
                break
            victim = kept.pop()
            free += victim.blocks if cache is None else cache.preempt(victim, 0)
            preempt.append(Preemption(victim, "recompute", "back", pool.blocks_for(steps * len(kept))))
        if free < decode_need(kept, pool):
            raise out_of_memory("Decode", view)
        written = sum([known_length(request) - request.prompt for request in kept])
        limits = sum([request.max_tokens for request in kept]) + (0 if self.is_old else 1)
        ratio = min(1.0, (written + steps * len(kept)) / limits)
        state = SGLangState(ratio, decodes_left=wait)
        order = None if tried.order is None else [*tried.order, *(preemption.request for preemption in preempt)]
        return Plan(
            preempt=preempt, reorder=Reorder(order, [*kept, *view.prefilling]), decode=True, state=state,
            extra=tried.cache_use(make_room),
        )  # fmt: skip


def decode_need(requests: list[Request], pool: BlockPool) -> int:
    """Return the new blocks that one decode step of these requests needs."""
    return sum([pool.blocks_for(request.cached + 1) - request.blocks for request in requests])

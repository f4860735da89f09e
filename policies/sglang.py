"""SGLang: prefill first. Admission reserves a fraction of the future output tokens; the fraction adapts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.core import (
    FOREVER,
    Chunk,
    Plan,
    Policy,
    Preemption,
    Request,
    Stuck,
    Traits,
    View,
    require_at_least,
    require_one_of,
)
from servesim.core.native import mypyc_attr


class SGLangState(NamedTuple):
    """Policy state."""

    new_token_ratio: float  # fraction of the future output tokens that admissions reserve
    batch_is_full: bool = False  # no other request fits until the batch shrinks
    last_decoding: Optional[int] = None  # number of requests in the last decode step; None after a prefill
    batch_shrank: bool = False  # requests finished since the last decode step


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class SGLang(Policy):
    """The scheduler of SGLang without prefix caching. It counts memory in tokens: use `block_size: 1`."""

    schedule_policy: str = "fcfs"  # order of the waiting queue: fcfs, lof (longest output limit first)
    max_prefill_tokens: int = 16384  # prompt tokens per prefill; a single prompt may be longer
    chunked_prefill_size: Optional[int] = 8192  # tokens per prefill step; null: whole prompts
    max_running_requests: Optional[int] = None  # maximum decoding requests; null: SGLang's estimate
    schedule_conservativeness: float = 1.0  # factor of init_new_token_ratio
    enable_mixed_chunk: bool = False  # mixed steps: decodes run with prompts
    init_new_token_ratio: float = 0.7  # first fraction of future output tokens that admissions reserve
    min_new_token_ratio_factor: float = 0.14  # lowest fraction, relative to the first one
    new_token_ratio_decay_steps: int = 600  # decode steps from the first to the lowest fraction
    retract_decode_steps: int = 20  # decode steps that must fit after a preemption
    clip_max_new_tokens: int = 4096  # maximum future output tokens that are counted per request

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 1, "max_prefill_tokens", "chunked_prefill_size", "max_running_requests")
        require_at_least(self, 1, "new_token_ratio_decay_steps", "retract_decode_steps", "clip_max_new_tokens")
        require_at_least(self, 0, "schedule_conservativeness", "init_new_token_ratio", "min_new_token_ratio_factor")
        require_one_of(self, schedule_policy=("fcfs", "lof"))

    @property
    def traits(self) -> Traits:
        return Traits(
            engine="SGLang 0.4.6, without its prefix cache",
            validated_against="not validated: written from the source code",
        )

    def engine_refusals(self, block_size: int, max_model_len: Optional[int]) -> list[str]:
        size = self.chunked_prefill_size
        if size is None or size % block_size == 0:
            return []
        return [f"chunked_prefill_size ({size}) is no multiple of engine.block_size ({block_size})"]

    @property
    def is_sorted(self) -> bool:
        return self.schedule_policy == "lof" or super().is_sorted

    def sort_key(self, request: Request) -> Any:
        key = super().sort_key(request)
        return (-request.limit, key) if self.schedule_policy == "lof" else key

    @property
    def first_ratio(self) -> float:
        """The new_token_ratio at the start, and after the batch was empty."""
        return min(self.init_new_token_ratio * self.schedule_conservativeness, 1.0)

    def initial_state(self) -> Any:
        return SGLangState(self.first_ratio)

    def advance_state(self, state: Any, steps: int) -> Any:
        ratio = state.new_token_ratio
        for _ in range(steps):
            decayed = self._decay(ratio)
            if decayed == ratio:
                break
            ratio = decayed
        return state._replace(new_token_ratio=ratio)

    def _decay(self, ratio: float) -> float:
        minimum = self.first_ratio * self.min_new_token_ratio_factor
        return max(ratio - (self.first_ratio - minimum) / self.new_token_ratio_decay_steps, minimum)

    def decide(self, view: View) -> Plan:
        state: SGLangState = view.state
        decoding = view.decoding
        shrank = state.batch_shrank or (state.last_decoding is not None and decoding < state.last_decoding)
        full = state.batch_is_full
        if view.prefilling or (view.waiting and not full):
            adder = PrefillAdder(self, view, state.new_token_ratio)
            adder.fill()
            full = full or adder.full
            if adder.chunks:
                # A prompt that continues in the next step has no row in a decode, so another request may fit.
                state = SGLangState(state.new_token_ratio, full and not adder.continues, None, shrank)
                decode = self.enable_mixed_chunk and decoding > 0
                return Plan(chunks=adder.chunks, decode=decode, state=state)
        if not decoding:
            return Plan(state=SGLangState(self.first_ratio))
        if view.pool.free < decoding:
            return self._retract(view)
        full = full and not shrank
        hold = FOREVER if full or not view.waiting else 0
        keep_free = decoding if view.pool.block_size > 1 else 0
        state = SGLangState(self._decay(state.new_token_ratio), full, decoding)
        return Plan(decode=True, hold=hold, keep_free=keep_free, state=state)

    def _retract(self, view: View) -> Plan:
        """Preempt requests with the fewest generated tokens, at least one, until retract_decode_steps steps fit."""
        size = view.pool.block_size
        kept = [request for request in view.running if request.decodes]
        kept.sort(key=lambda request: (request.written, -request.prompt), reverse=True)
        preempt: list[Preemption] = []
        free = view.pool.free
        while len(kept) > 1 and (not preempt or free * size < self.retract_decode_steps * len(kept)):
            victim = kept.pop()
            free += victim.blocks
            preempt.append(Preemption(victim, "recompute", "back"))
        if free < sum(view.pool.blocks_for(request.cached + 1) - request.blocks for request in kept):
            raise Stuck("SGLang fails with an assertion: no block is free for the only request", kept, view.now)
        written = sum(request.written for request in kept)
        limits = sum(request.limit for request in kept)
        ratio = min(1.0, (written + self.retract_decode_steps * len(kept)) / limits)
        running = [*kept, *view.prefilling]
        return Plan(preempt=preempt, reorder_running=running, decode=True, state=SGLangState(ratio, False, len(kept)))


class PrefillAdder:
    """The prompts of one prefill step, and what is left of its budgets. SGLang has a class of this name."""

    def __init__(self, policy: SGLang, view: View, ratio: float) -> None:
        self.policy = policy
        self.view = view
        self.chunks: list[Chunk] = []
        self.full = False
        self.continues = False  # whether the last prompt continues in the next step
        mixed = view.decoding if policy.enable_mixed_chunk else 0
        self.free_blocks = view.pool.free - (view.decode_block_need if mixed else 0)
        self.free_tokens = view.pool.free * view.pool.block_size - mixed
        self.unreserved_tokens = self.free_tokens - self._future_tokens() * ratio  # less the reservation for outputs
        self.prefill_tokens_left = policy.max_prefill_tokens - mixed
        size = policy.chunked_prefill_size
        self.chunk_tokens_left = FOREVER if size is None else size - mixed

    def _future_tokens(self) -> int:
        """Return the tokens that the decoding requests may still generate."""
        view, clip = self.view, self.policy.clip_max_new_tokens
        decoding = [request for request in view.running if request.decodes] if view.prefilling else view.running
        if max((request.limit for request in decoding), default=0) <= clip:
            # Each request has cached its prompt and all generated tokens except the last.
            totals = sum([request.prompt + request.limit for request in decoding])
            return totals - view.cohort.context - len(decoding)
        return sum(min(request.limit - request.written, clip) for request in decoding)

    def fill(self) -> None:
        """Continue the partly computed prompt, then admit from waiting until a budget is used up."""
        for request in self.view.prefilling:
            free = (self.free_blocks + request.blocks) * self.view.pool.block_size - request.cached
            tokens = min(request.pending, self.chunk_tokens_left, free)
            if tokens > 0:
                self._append(request, tokens)
        max_new = self._max_rows() - self.view.decoding
        for request in self.view.waiting:
            if len(self.chunks) >= max_new:
                self.full = True
                return
            if not self._add(request):
                return

    def _max_rows(self) -> int:
        if self.policy.max_running_requests is not None:
            return self.policy.max_running_requests
        pool, context = self.view.pool, self.view.max_model_len
        estimate = 0 if context is None else int(pool.total * pool.block_size / context * 512)
        return min(max(estimate, 2048), 4096)

    def _add(self, request: Request) -> bool:
        """Add a request if it fits. Return whether to try the next request."""
        length = request.length
        blocks = self.view.pool.blocks_for(min(length, self.chunk_tokens_left))
        if (
            length + min(request.limit, self.policy.clip_max_new_tokens) >= self.unreserved_tokens
            or blocks > self.free_blocks
        ):
            self.full = True
            return False
        if self.continues or self.chunk_tokens_left <= 0 or (length > self.prefill_tokens_left and self.chunks):
            return False
        self._append(request, min(length, self.chunk_tokens_left))
        if self.unreserved_tokens <= 0 or self.free_tokens <= 0:
            self.full = True
            return False
        return self.prefill_tokens_left > 0 and self.chunk_tokens_left > 0

    def _append(self, request: Request, tokens: int) -> None:
        self.continues = tokens < request.pending
        reserved = 0 if self.continues else min(request.limit, self.policy.clip_max_new_tokens)
        self.chunks.append(Chunk(request, tokens))
        self.free_blocks -= self.view.pool.blocks_for(request.cached + tokens) - request.blocks
        self.free_tokens -= tokens
        self.unreserved_tokens -= tokens + reserved
        self.prefill_tokens_left -= tokens
        self.chunk_tokens_left -= tokens

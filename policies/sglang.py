"""SGLang: prefill first, admission by a share of the answers still to come that adapts to what memory allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.core import FOREVER, Chunk, Eviction, Plan, Policy, Request, Stuck, Traits, View, at_least, one_of


class State(NamedTuple):
    """What the scheduler remembers."""

    ratio: float  # share of the tokens still to come that admissions leave room for (new_token_ratio)
    full: bool = False  # nobody else fits, until the batch shrinks
    size: Optional[int] = None  # of the batch that decoded in the last step
    shrunk: bool = False  # it has got smaller since, which the next decode will notice


@dataclass(frozen=True)
class SGLang(Policy):
    """SGLang's scheduler without prefix caching, its memory a pool of tokens (blocks of one)."""

    schedule_policy: str = "fcfs"  # order of waiting: fcfs, lof (longest output limit first)
    max_prefill_tokens: int = 16384  # prompt tokens of a prefill, though one prompt may be longer
    chunked_prefill_size: Optional[int] = 8192  # tokens of a prefill step, None for whole prompts (SGLang's -1)
    max_running_requests: Optional[int] = None  # requests that decode at once, None for SGLang's own estimate
    schedule_conservativeness: float = 1.0  # scales the share of answers to come that admissions leave room for
    enable_mixed_chunk: bool = False  # decodes run along with prompts
    init_new_token_ratio: float = 0.7  # that share to begin with
    min_new_token_ratio_factor: float = 0.14  # what of it is left when nothing was ever retracted
    new_token_ratio_decay_steps: int = 600  # decodes that this takes
    retract_decode_steps: int = 20  # decodes to have room for after a retraction
    clip_max_new_tokens: int = 4096  # tokens that no answer is expected to exceed

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "max_prefill_tokens", "chunked_prefill_size", "max_running_requests")
        at_least(self, 1, "new_token_ratio_decay_steps", "retract_decode_steps", "clip_max_new_tokens")
        at_least(self, 0, "schedule_conservativeness", "init_new_token_ratio", "min_new_token_ratio_factor")
        one_of(self, schedule_policy=("fcfs", "lof"))

    @property
    def traits(self) -> Traits:
        return Traits(engine="SGLang 0.4.6, without its prefix cache", validated_against="not proven: read only")

    @property
    def ranked(self) -> bool:
        return self.schedule_policy == "lof" or super().ranked

    def rank(self, request: Request) -> Any:
        own = super().rank(request)
        return (-request.limit, own) if self.schedule_policy == "lof" else own

    @property
    def ratio(self) -> float:
        """The share of answers to come that a fresh scheduler leaves room for."""
        return min(self.init_new_token_ratio * self.schedule_conservativeness, 1.0)

    def begin(self) -> Any:
        return State(self.ratio)

    def leap(self, memory: Any, iterations: int) -> Any:
        ratio = memory.ratio
        for _ in range(iterations):
            decayed = self._decayed(ratio)
            if decayed == ratio:
                break
            ratio = decayed
        return memory._replace(ratio=ratio)

    def _decayed(self, ratio: float) -> float:
        least = self.ratio * self.min_new_token_ratio_factor
        return max(ratio - (self.ratio - least) / self.new_token_ratio_decay_steps, least)

    def decide(self, view: View) -> Plan:
        state: State = view.memory
        decoding = view.decoding
        shrunk = state.shrunk or (state.size is not None and decoding < state.size)
        full = state.full
        if view.prefilling or (view.waiting and not full):
            adder = Adder(self, view, state.ratio)
            adder.fill()
            full = full or adder.full
            if adder.chunks:
                # A prompt that goes on in the next step gives up its row meanwhile, which counts as room.
                memory = State(state.ratio, full and not adder.unfinished, None, shrunk)
                decode = self.enable_mixed_chunk and decoding > 0
                return Plan(chunks=adder.chunks, decode=decode, memory=memory)
        if not decoding:
            return Plan(memory=State(self.ratio))
        if view.pool.free < decoding:
            return self._retract(view)
        full = full and not shrunk
        hold = FOREVER if full or not view.waiting else 0
        spare = decoding if view.pool.size > 1 else 0
        memory = State(self._decayed(state.ratio), full, decoding)
        return Plan(decode=True, hold=hold, spare=spare, memory=memory)

    def _retract(self, view: View) -> Plan:
        """Take the least advanced out of the batch, at least one, until the rest can go on for a while."""
        size = view.pool.size
        kept = [request for request in view.running if request.decodes]
        kept.sort(key=lambda request: (request.written, -request.prompt), reverse=True)
        evict: list[Eviction] = []
        free = view.pool.free
        while len(kept) > 1 and (not evict or free * size < self.retract_decode_steps * len(kept)):
            victim = kept.pop()
            free += victim.blocks
            evict.append(Eviction(victim, "recompute", "back"))
        if free < sum(view.pool.blocks(request.cached + 1) - request.blocks for request in kept):
            raise Stuck("SGLang asserts: no space left for the only request that decodes", kept, view.now)
        written = sum(request.written for request in kept)
        limits = sum(request.limit for request in kept)
        ratio = min(1.0, (written + self.retract_decode_steps * len(kept)) / limits)
        running = [*kept, *view.prefilling]
        return Plan(evict=evict, running=running, decode=True, memory=State(ratio, False, len(kept)))


class Adder:
    """The prompts of one prefill step, and the budgets they must fit."""

    def __init__(self, policy: SGLang, view: View, ratio: float) -> None:
        self.policy = policy
        self.view = view
        self.chunks: list[Chunk] = []
        self.full = False
        self.unfinished = False  # whether the last prompt goes on in the next step
        mixed = view.decoding if policy.enable_mixed_chunk else 0
        self.blocks = view.pool.free - (view.need if mixed else 0)
        self.now = view.pool.free * view.pool.size - mixed  # tokens that prompts may take now
        self.total = self.now - self._to_come() * ratio  # and in the long run
        self.input = policy.max_prefill_tokens - mixed
        size = policy.chunked_prefill_size
        self.chunk = FOREVER if size is None else size - mixed

    def _to_come(self) -> int:
        """Return the tokens that the decoding requests may still write."""
        view, clip = self.view, self.policy.clip_max_new_tokens
        decoding = [request for request in view.running if request.decodes] if view.prefilling else view.running
        if max((request.limit for request in decoding), default=0) <= clip:
            # Each has cached its prompt and what it wrote but the last token.
            totals = sum([request.prompt + request.limit for request in decoding])
            return totals - view.cohort.context - len(decoding)
        return sum(min(request.limit - request.written, clip) for request in decoding)

    def fill(self) -> None:
        """Go on with the prompt under way, then take from waiting until something is used up."""
        for request in self.view.prefilling:
            room = (self.blocks + request.blocks) * self.view.pool.size - request.cached
            tokens = min(request.pending, self.chunk, room)
            if tokens > 0:
                self._take(request, tokens)
        rows = self._rows() - self.view.decoding
        for request in self.view.waiting:
            if len(self.chunks) >= rows:
                self.full = True
                return
            if not self._add(request):
                return

    def _rows(self) -> int:
        if self.policy.max_running_requests is not None:
            return self.policy.max_running_requests
        pool, context = self.view.pool, self.view.max_model_len
        estimate = 0 if context is None else int(pool.total * pool.size / context * 512)
        return min(max(estimate, 2048), 4096)

    def _add(self, request: Request) -> bool:
        """Add a request if it fits; say whether to go on to the next."""
        length = request.length
        blocks = self.view.pool.blocks(min(length, self.chunk))
        if length + min(request.limit, self.policy.clip_max_new_tokens) >= self.total or blocks > self.blocks:
            self.full = True
            return False
        if self.unfinished or self.chunk <= 0 or (length > self.input and self.chunks):
            return False
        self._take(request, min(length, self.chunk))
        if self.total <= 0 or self.now <= 0:
            self.full = True
            return False
        return self.input > 0 and self.chunk > 0

    def _take(self, request: Request, tokens: int) -> None:
        self.unfinished = tokens < request.pending
        promised = 0 if self.unfinished else min(request.limit, self.policy.clip_max_new_tokens)
        self.chunks.append(Chunk(request, tokens))
        self.blocks -= self.view.pool.blocks(request.cached + tokens) - request.blocks
        self.now -= tokens
        self.total -= tokens + promised
        self.input -= tokens
        self.chunk -= tokens

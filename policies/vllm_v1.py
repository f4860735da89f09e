"""vLLM V1: no prefill phase. Every step has one token budget, for running requests first, then for waiting ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Optional

from servesim.core import (
    DECODE_PAST_FINISH,
    DECODE_UNTIL_FINISH,
    IDLE_PLAN,
    CachedPrefix,
    Chunk,
    Plan,
    Policy,
    Preemption,
    Request,
    Traits,
    View,
    require_at_least,
    require_effect,
    require_one_of,
)
from servesim.core.native import mypyc_attr

from .vllm_v0_common import budget_refusals, prefilling_is_last, priority_key, require_below_one

NO_PREFIX: Final = CachedPrefix(0, 0, False, 0)
DECODE_ONCE: Final = Plan(decode=True)
OLDEST: Final = (0, 11, 0)  # versions whose rules are known
NEWEST: Final = (0, 32, 0)
SETTING_SINCE: Final = {  # settings that older versions do not have, and the first version with them
    "scheduler_reserve_full_isl": (0, 19, 0),
    "watermark": (0, 24, 0),
    "long_prefill_token_threshold_adaptive": (0, 31, 0),
    "max_num_active_seqs": (0, 31, 0),
}


def is_version(text: str) -> bool:
    """Whether a text is a version such as 0.32.0."""
    parts = text.split(".")
    return len(parts) == 3 and all(part.isascii() and part.isdecimal() for part in parts)


def version_number(text: str) -> tuple[int, ...]:
    """Return a version as numbers, which can be compared."""
    return tuple(map(int, text.split(".")))


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class VLLMV1(Policy):
    """The scheduler of vLLM V1, with the class defaults of 0.32."""

    version: str = "0.32.0"  # version of vLLM, 0.11.0 to 0.32.0: the rules of this version apply
    max_num_seqs: int = 128  # maximum running requests
    max_num_active_seqs: Optional[int] = None  # the same limit, without other effects on the engine (from 0.31)
    max_num_batched_tokens: int = 2048  # tokens per step, including decodes
    enable_chunked_prefill: bool = True  # a prompt may be chunked to fit the budget; otherwise it waits
    long_prefill_token_threshold: int = 0  # maximum tokens of one prompt per step; 0: off
    long_prefill_token_threshold_adaptive: bool = False  # this maximum is at least an equal share of the budget
    scheduler_reserve_full_isl: bool = True  # admit only if the blocks of the whole prompt are free (from 0.19)
    enable_prefix_caching: bool = True  # requests with equal beginnings share KV blocks
    watermark: float = 0.0  # fraction of the blocks that an admission must leave free if requests run (from 0.24)
    policy: str = "fcfs"  # fcfs, or priority: waiting queue and victims sorted by (priority, arrival)
    async_scheduling: bool = True  # decide a step while the last one runs; default since 0.14

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 1, "max_num_seqs", "max_num_active_seqs", "max_num_batched_tokens")
        require_at_least(self, 0, "long_prefill_token_threshold", "watermark")
        require_below_one(self.watermark)
        require_one_of(self, policy=("fcfs", "priority"))
        require_effect(self, self.policy == "fcfs" or self.order == "priority", "order: priority", "aging")
        self._require_version()

    def _require_version(self) -> None:
        """Raise a ValueError for an unknown version, and for settings that the version does not have."""
        if not is_version(self.version) or not OLDEST <= version_number(self.version) <= NEWEST:
            raise ValueError(f"version: expected 0.11.0 to 0.32.0, got {self.version!r}")
        for name, since in SETTING_SINCE.items():
            value = getattr(self, name)
            if value and not self.is_since(since):
                first = ".".join(map(str, since))
                raise ValueError(f"{name}: vLLM {self.version} does not have it (from {first} on), got {value!r}")
        if not self.enable_chunked_prefill and not self.is_since((0, 12, 0)):
            raise ValueError(
                f"enable_chunked_prefill: expected True with version {self.version}: its rules without "
                "chunked prefill are not modelled, got False"
            )
        if self.policy == "priority" and not self.is_since((0, 11, 1)):
            raise ValueError(
                f"policy: expected fcfs with version {self.version}: after a preemption, its priority "
                "scheduling computes wrong tokens, which is not modelled, got 'priority'"
            )

    def is_since(self, version: tuple[int, ...]) -> bool:
        """Whether a rule that came with this version applies."""
        return version_number(self.version) >= version

    @property
    def traits(self) -> Traits:
        free_order = "hashed_last" if self.is_since((0, 24, 0)) else "append"
        lookups = "lookup" if self.is_since((0, 11, 1)) else "lookup-all"
        return Traits(
            engine=f"vLLM V1 {self.version}, without speculation",
            validated_against="recordings of the real schedulers of 0.11.0, 0.14.0, 0.19.0, 0.27.0 and 0.32.0",
            arrival_is_send_time=True,  # the API server stamps it
            rejects_oversized=False,  # the real scheduler does not check this; such a request blocks the queue
            rejects_full_prompts=True,  # vLLM's input processor
            resumed_token_decodes=True,
            empty_step=0.001,  # its loop sleeps after a step without a model call
            prefix_cache=free_order if self.enable_prefix_caching else "",
            prefix_cache_counts="admission" if self.is_since((0, 27, 0)) else lookups,
            steps_in_flight=2 if self.async_scheduling else 1,
            foresees_ends=self.is_since((0, 11, 1)),
        )

    def engine_refusals(self, block_size: int, max_model_len: Optional[int]) -> list[str]:
        refusals = budget_refusals(
            self.max_num_batched_tokens, self.max_num_seqs, not self.enable_chunked_prefill, max_model_len
        )
        threshold = self.long_prefill_token_threshold
        if max_model_len is not None and threshold > max_model_len:
            refusals.append(f"long_prefill_token_threshold ({threshold}) is above max_model_len ({max_model_len})")
        active = self.max_num_active_seqs
        if active is not None and active > self.max_num_seqs:
            refusals.append(f"max_num_active_seqs ({active}) is above max_num_seqs ({self.max_num_seqs})")
        return refusals

    @property
    def is_sorted(self) -> bool:
        return super().is_sorted or self.policy == "priority"

    def sort_key(self, request: Request) -> Any:
        return (request.priority, super().sort_key(request)) if self.policy == "priority" else super().sort_key(request)

    def decide(self, view: View) -> Plan:
        tokens, free = self.max_num_batched_tokens - view.decoding, view.pool.free - view.decode_block_need
        if tokens >= 0 and free >= 0 and not view.waiting and not view.prefilling:
            return DECODE_PAST_FINISH if view.decoding else IDLE_PLAN
        max_chunk = self._max_chunk(len(view.running) + len(view.waiting))
        if tokens < 0 or free < 0:  # some requests do not run in this step, or are preempted
            return self._schedule_one_by_one(view, max_chunk)
        in_order = prefilling_is_last(view.running, view.prefilling)
        chunks: list[Chunk] = []
        for request in view.prefilling:
            size = self._chunk_tokens(view, request, min(max_chunk, tokens) if in_order else max_chunk)
            free -= view.pool.blocks_for(request.cached + size) - request.blocks
            tokens -= size
            if size:
                chunks.append(Chunk(request, size))
        if tokens < 0 or free < 0:
            return self._schedule_one_by_one(view, max_chunk)
        admitted, may_grow = self._admit(view, chunks, max_chunk, tokens, free) if view.waiting else ([], False)
        if not chunks and not admitted:
            return (DECODE_ONCE if may_grow else DECODE_UNTIL_FINISH) if view.decoding else IDLE_PLAN
        if in_order or not view.decoding:
            return Plan(chunks=chunks + admitted if chunks else admitted, decode=view.decoding > 0, decode_first=True)
        by_request = {chunk.request: chunk for chunk in chunks}
        batch = [by_request.get(r) or Chunk(r, 1) for r in view.running if r.decodes or r in by_request]
        return Plan(chunks=batch + admitted)

    def _max_chunk(self, requests: int) -> int:
        """Return the maximum tokens of one prompt in this step. From 0.31 on, the only request has no limit."""
        limit, budget = self.long_prefill_token_threshold, self.max_num_batched_tokens
        if not limit or (requests == 1 and self.is_since((0, 31, 0))):
            return budget
        return max(limit, budget // requests) if self.long_prefill_token_threshold_adaptive else limit

    def _chunk_tokens(self, view: View, request: Request, tokens: int) -> int:
        """Return the tokens that a running request computes in this step."""
        size = 0 if request.awaits_end else min(request.pending, tokens)
        return size if view.max_model_len is None else min(size, view.max_model_len - 1 - request.cached)

    def _admit(
        self, view: View, running: list[Chunk], max_chunk: int, tokens: int, free: int
    ) -> tuple[list[Chunk], bool]:
        """Admit from the head of waiting, after the chunks of running requests.

        Only the blocks of the first chunk are allocated. Also return whether the head may soon find more cached blocks.
        """
        pool, cache, max_admitted, prefix = (
            view.pool,
            view.prefix_cache,
            (self.max_num_active_seqs or self.max_num_seqs) - len(view.running),
            NO_PREFIX,
        )
        if cache is not None:
            cache.start(running)
        watermark_blocks = int(self.watermark * (pool.total + 1))  # vLLM counts the null block, the pool does not
        chunks: list[Chunk] = []
        cached = shared = 0  # tokens, and blocks that other requests hold too
        for request in view.waiting:
            if len(chunks) >= max_admitted or tokens <= 0:
                break
            length = request.length
            if cache is not None:
                prefix = cache.find(request, free)
                cached, shared = prefix.tokens, prefix.tokens // pool.block_size - prefix.idle_blocks
            size = min(length - cached, max_chunk)
            if size > tokens and not self.enable_chunked_prefill:
                break
            size = min(size, tokens)
            need = pool.blocks_for(length if self.scheduler_reserve_full_isl else cached + size)
            if need - shared + (watermark_blocks if view.running or chunks else 0) > free:
                break
            free -= pool.blocks_for(cached + size) - shared
            tokens -= size
            chunks.append(Chunk(request, size, cached=cached))
            if cache is not None:
                cache.admit(request, prefix, size)
        return chunks, prefix.may_grow

    def _schedule_one_by_one(self, view: View, max_chunk: int) -> Plan:
        """Schedule the running requests in order. If blocks are missing, preempt."""
        pool, cache, free, tokens = view.pool, view.prefix_cache, view.pool.free, self.max_num_batched_tokens
        if cache is not None:
            cache.start()
        running = list(view.running)
        scheduled: dict[Request, int] = {}  # tokens per request, in batch order
        preempt: list[Preemption] = []
        index = 0
        while index < len(running) and tokens > 0:
            request = running[index]
            size = self._chunk_tokens(view, request, min(max_chunk, tokens))
            need = pool.blocks_for(request.cached + size) - request.blocks if size else 0
            first_victim = len(preempt)
            while need > free:
                victim = running[-1] if self.policy == "fcfs" else max(running, key=priority_key)
                running.remove(victim)
                returned_tokens = scheduled.pop(victim, 0)  # the victim was already scheduled in this step
                preempt.append(Preemption(victim, tokens=returned_tokens))
                if cache is not None:
                    free += cache.preempt(victim, returned_tokens)
                else:
                    free += pool.blocks_for(victim.cached + returned_tokens) if returned_tokens else victim.blocks
                if returned_tokens:
                    tokens += returned_tokens
                    index -= 1
                if victim is request:  # no request gets the blocks of these victims
                    preempt[first_victim:] = [victim._replace(frees_last=True) for victim in preempt[first_victim:]]
                    return Plan(preempt=preempt, chunks=[Chunk(r, size) for r, size in scheduled.items()])
            if size:
                scheduled[request] = size
                free -= need
                tokens -= size
            index += 1
        chunks = [Chunk(r, size) for r, size in scheduled.items()]
        if not preempt:
            chunks += self._admit(view, chunks, max_chunk, tokens, free)[0]
        return Plan(preempt=preempt, chunks=chunks)

"""The settings of vLLM V1: what each version accepts, and what follows from them for every decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Optional

from servesim.core import Fraction, Int0, Int1, Policy, Request, require_effect
from servesim.core.limits import MAX_DRAFTS
from servesim.core.native import mypyc_attr
from servesim.policies.vllm_common import budget_refusals, priority_key

from .drafting import Drafting, drafting_of
from .rules import VLLMRules

OLDEST: Final = (0, 11, 0)  # versions whose rules are known
NEWEST: Final = (0, 32, 0)
MAX_STAGES: Final = 128  # more than models have layers
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
class VLLMSettings(Policy):
    """The settings of vLLM V1, with the class defaults of 0.32. `VLLMV1` decides with them."""

    version: str = "0.32.0"  # version of vLLM, 0.11.0 to 0.32.0: the rules of this version apply
    max_num_seqs: Int1 = 128  # maximum running requests
    max_num_active_seqs: Optional[Int1] = None  # the same limit, without other effects on the engine (from 0.31)
    max_num_batched_tokens: Int1 = 2048  # tokens per step, including decodes
    enable_chunked_prefill: bool = True  # a prompt may be chunked to fit the budget; otherwise it waits
    long_prefill_token_threshold: Int0 = 0  # maximum tokens of one prompt per step; 0: off
    long_prefill_token_threshold_adaptive: bool = False  # this maximum is at least an equal share of the budget
    scheduler_reserve_full_isl: bool = True  # admit only if the blocks of the whole prompt are free (from 0.19)
    enable_prefix_caching: bool = True  # requests with equal beginnings share KV blocks
    # models with windows: tokens between places where a later prompt can use the cache; 0: prompts only; None: all
    prefix_cache_retention_interval: Optional[Int0] = 0
    watermark: Fraction = 0.0  # fraction of the blocks that an admission must leave free if requests run (from 0.24)
    # fcfs, or priority: waiting queue and victims sorted by (priority, arrival)
    policy: Literal["fcfs", "priority"] = "fcfs"
    num_speculative_tokens: Int0 = 0  # drafted tokens per request and step; 0: no speculative decoding
    speculative_method: Literal["ngram", "eagle", "eagle3", "mtp", "draft_model"] = "eagle"  # what drafts them
    mtp_modules: Int1 = 1  # of the method mtp
    async_scheduling: bool = True  # decide a step while the last one runs; default since 0.14
    pipeline_parallel_size: Int1 = 1  # stages of the model, each of which computes a batch of its own

    def __post_init__(self) -> None:
        super().__post_init__()
        require_effect(self, self.policy == "fcfs" or self.order == "priority", "order: priority", "aging")
        self._require_version()
        self._require_known()

    def _require_known(self) -> None:
        """Raise a ValueError if speculative decoding or pipeline parallelism is not known with these fields."""
        for name, off, most in (("num_speculative_tokens", 0, MAX_DRAFTS), ("pipeline_parallel_size", 1, MAX_STAGES)):
            value = getattr(self, name)
            if value > most:
                raise ValueError(f"{name}: expected at most {most}, got {value}")
            if value != off and version_number(self.version) < NEWEST:
                why = f"with version {self.version}: its rules are known for 0.32.0 only"
                raise ValueError(f"{name}: expected {off} {why}, got {value}")
        if self.num_speculative_tokens and self.async_scheduling and self.speculative_method == "ngram":
            raise ValueError("async_scheduling: expected False with speculative_method ngram, as in vLLM, got True")
        if self.num_speculative_tokens and self.pipeline_parallel_size > 1:
            stages = self.pipeline_parallel_size
            raise ValueError(f"pipeline_parallel_size: expected 1 with speculative decoding, got {stages}")

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

    def rules(self) -> VLLMRules:
        drafts = f", with {self.speculative_method} drafts" if self.num_speculative_tokens else ""
        known = "recordings of the real schedulers of 0.11.0, 0.14.0, 0.19.0, 0.27.0 and 0.32.0"
        stages = self.pipeline_parallel_size
        return VLLMRules(
            f"vLLM V1 {self.version}{drafts}",
            f"{known}; of 0.32.0 with drafts" if self.num_speculative_tokens else known,
            stages + 1 if self.async_scheduling else stages,
            self.enable_prefix_caching,
            version_number(self.version),
            self.drafting,
            stages,
        )

    def engine_refusals(self, block_size: int, max_model_len: Optional[int]) -> list[str]:
        refusals = budget_refusals(
            self.max_num_batched_tokens, self.max_num_seqs, not self.enable_chunked_prefill, max_model_len
        )
        threshold = self.long_prefill_token_threshold
        if max_model_len is not None and threshold > max_model_len:
            refusals.append(f"long_prefill_token_threshold ({threshold}) is above max_model_len ({max_model_len})")
        interval = self.prefix_cache_retention_interval
        if interval and interval % block_size:
            refusals.append(f"prefix_cache_retention_interval ({interval}) is no multiple of block_size ({block_size})")
        drafting = self.drafting
        if drafting.prefill_lookahead > max(1, block_size) and self.enable_prefix_caching:
            refusals.append(f"num_speculative_tokens ({drafting.tokens}) is above block_size ({block_size}) with mtp")
        active = self.max_num_active_seqs
        if active is not None and active > self.max_num_seqs:
            refusals.append(f"max_num_active_seqs ({active}) is above max_num_seqs ({self.max_num_seqs})")
        return refusals

    @property
    def is_sorted(self) -> bool:
        return super().is_sorted or self.policy == "priority"

    def sort_key(self, request: Request) -> Any:
        return (request.priority, super().sort_key(request)) if self.policy == "priority" else super().sort_key(request)

    @property
    def drafting(self) -> Drafting:
        """What the method of speculation changes."""
        return drafting_of(self.speculative_method, self.num_speculative_tokens, self.mtp_modules)

    def max_chunk(self, requests: int) -> int:
        """Return the maximum tokens of one prompt in this step. From 0.31 on, the only request has no limit."""
        limit, budget = self.long_prefill_token_threshold, self.max_num_batched_tokens
        if not limit or (requests == 1 and self.is_since((0, 31, 0))):
            return budget
        return max(limit, budget // requests) if self.long_prefill_token_threshold_adaptive else limit

    def victim(self, running: Sequence[Request]) -> Request:
        """Return the running request that is preempted next."""
        return running[-1] if self.policy == "fcfs" else max(running, key=priority_key)

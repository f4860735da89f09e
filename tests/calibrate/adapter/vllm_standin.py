"""A stand-in for vLLM's scheduler: only what the adapter uses, without prefix cache and asynchronous scheduling.

The order of its steps is that of vLLM 0.32: running requests, then waiting ones. test_vllm_inside.py uses the real one.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

Status = Enum("Status", "WAITING RUNNING PREEMPTED")
Pause = Enum("Pause", "UNPAUSED PAUSED_NEW PAUSED_ALL")


class Queue(deque[Any]):
    """vLLM's FCFSRequestQueue."""


class Entry:
    """A request of vLLM."""

    def __init__(self, id: str, prompt: int, max_tokens: int, arrival: float = 0.0, priority: int = 0) -> None:
        self.request_id, self.num_prompt_tokens, self.max_tokens = id, prompt, max_tokens
        self.arrival_time, self.priority, self.status = arrival, priority, Status.WAITING
        self.num_output_tokens = self.num_output_placeholders = self.num_computed_tokens = self.num_preemptions = 0
        self.num_stale_output_tokens, self.drop_stale_output, self.is_prefill_chunk = 0, False, False

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


class Scheduler:
    """vLLM's Scheduler."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config, self.scheduler_config = vllm_config, vllm_config.scheduler_config
        self.max_num_running_reqs, self.max_num_scheduled_tokens = (
            self.scheduler_config.max_num_seqs,
            vllm_config.tokens,
        )
        self.block_size, self.max_model_len, self.pause_state = 4, 1000, Pause.UNPAUSED
        self.waiting, self.running, self.requests = Queue(), [], {}  # type: Any, list[Any], dict[str, Any]
        self.is_encoder_decoder, self.kv_cache_config = False, SimpleNamespace(kv_cache_groups=[None])
        self.free, self.held = vllm_config.blocks, {}  # type: int, dict[str, list[int]]
        pool = SimpleNamespace(num_gpu_blocks=vllm_config.blocks + 1, get_num_free_blocks=lambda: self.free)
        self.kv_cache_manager = SimpleNamespace(
            block_pool=pool, enable_caching=vllm_config.caching,
            coordinator=SimpleNamespace(single_type_managers=[SimpleNamespace(req_to_blocks=self.held)]),
        )  # fmt: skip
        self.num_lookahead_tokens = 0
        self.reset_preempted: list[str] = []

    def add_request(self, entry: Entry) -> None:
        self.requests[entry.request_id] = entry
        self.waiting.append(entry)

    def _handle_blocked_waiting_request(self, entry: Entry) -> bool:
        return True

    def _reserve_prefill_lookahead(self, entry: Entry, computed: int, tokens: int) -> int:
        return tokens

    def _make_cached_request_data(self) -> None:
        pass

    def _preempt_request(self, entry: Entry, now: float) -> None:
        self.free += len(self.held.pop(entry.request_id, []))
        entry.status, entry.num_computed_tokens, entry.num_preemptions = Status.PREEMPTED, 0, entry.num_preemptions + 1
        self.waiting.appendleft(entry)

    def allocate(self, entry: Entry, tokens: int) -> bool:
        held = self.held.setdefault(entry.request_id, [])
        length = entry.num_computed_tokens + tokens + self.num_lookahead_tokens
        needed = -(-length // self.block_size) - len(held)
        if needed > self.free:
            return False
        self.free -= max(0, needed)
        held.extend([0] * needed)
        return True

    def schedule(self) -> Any:
        scheduled: dict[str, int] = {}
        budget = 0 if self.pause_state is Pause.PAUSED_ALL else self.max_num_scheduled_tokens
        for entry in list(self.running):
            tokens = min(entry.num_tokens - entry.num_computed_tokens, budget)
            tokens = self._reserve_prefill_lookahead(entry, entry.num_computed_tokens, tokens) if tokens else 0
            if not tokens or entry not in self.running:
                continue
            while not self.allocate(entry, tokens):
                self._preempt_request(self.running.pop(), 0.0)
            scheduled[entry.request_id] = tokens
            budget -= tokens
        while self.waiting and budget and len(self.running) < self.max_num_running_reqs and not self.paused_new:
            entry = self.waiting[0]
            tokens = self._reserve_prefill_lookahead(entry, 0, min(entry.num_tokens, budget))
            if not tokens or not self.allocate(entry, tokens):
                break
            self.running.append(self.waiting.popleft())
            entry.status, scheduled[entry.request_id], budget = Status.RUNNING, tokens, budget - tokens
        self._make_cached_request_data()
        for id, tokens in scheduled.items():
            entry = self.requests[id]
            entry.num_computed_tokens += tokens
            entry.is_prefill_chunk = entry.num_computed_tokens < entry.num_tokens
        return SimpleNamespace(num_scheduled_tokens=scheduled)

    @property
    def paused_new(self) -> bool:
        return self.pause_state is not Pause.UNPAUSED

    def update_from_output(self, output: Any, result: Any = None) -> None:
        for id in output.num_scheduled_tokens:
            entry = self.requests[id]
            if not entry.is_prefill_chunk:
                entry.num_output_tokens += 1
                if entry.num_output_tokens == entry.max_tokens:
                    self.free += len(self.held.pop(id))
                    self.running.remove(entry)
                    del self.requests[id]


def config(seats: int = 4, tokens: int = 64, blocks: int = 50, caching: bool = False, **more: Any) -> Any:
    """Return the configuration of a server."""
    flags = {
        "max_num_seqs": seats, "max_num_active_seqs": None, "enable_chunked_prefill": True, "policy": "fcfs",
        "long_prefill_token_threshold": 0, "long_prefill_token_threshold_adaptive": False, "watermark": 0.0,
        "scheduler_reserve_full_isl": True, "async_scheduling": False,
    }  # fmt: skip
    features: dict[str, Optional[Any]] = dict.fromkeys(("speculative_config", "lora_config", "kv_transfer_config"))
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(**{**flags, **more.pop("flags", {})}), tokens=tokens, blocks=blocks,
        caching=caching, parallel_config=SimpleNamespace(pipeline_parallel_size=1), **{**features, **more},
    )  # fmt: skip


def modules() -> dict[str, ModuleType]:
    """Return the modules of vLLM that the adapter imports."""
    vllm, scheduler, queue = (ModuleType(name) for name in ("vllm", "scheduler", "request_queue"))
    vllm.__version__, scheduler.Scheduler, queue.FCFSRequestQueue = "0.32.0+cpu", Scheduler, Queue  # type: ignore
    package = "vllm.v1.core.sched"
    return {"vllm": vllm, f"{package}.scheduler": scheduler, f"{package}.request_queue": queue}

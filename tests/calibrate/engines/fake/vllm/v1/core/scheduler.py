"""The scheduler: running requests first, then waiting ones; it preempts the newest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Scheduler:
    def __init__(self, config: Any) -> None:
        self.config, self.size = config.scheduler_config, config.cache_config.block_size
        self.free_blocks = config.cache_config.blocks - 1
        self.block_pool = SimpleNamespace(get_num_free_blocks=lambda: self.free_blocks)
        self.kv_cache_manager = SimpleNamespace(block_pool=self.block_pool, free=self.free)
        self.requests: dict[str, Any] = {}
        self.waiting: list[Any] = []
        self.running: list[Any] = []

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def free(self, request: Any) -> None:
        self.free_blocks += request.blocks
        request.blocks = 0

    def missing(self, request: Any, tokens: int) -> int:
        return max(0, -(-tokens // self.size) - request.blocks)

    def take(self, request: Any, tokens: int) -> None:
        blocks = self.missing(request, tokens)
        self.free_blocks -= blocks
        request.blocks += blocks

    def victim(self) -> Any:
        return self.running[-1]

    def ends(self, request: Any) -> bool:
        """Whether the last token by a length limit is in flight."""
        return request.placeholders > 0 and len(request.outputs) + request.placeholders >= request.params.max_tokens

    def schedule(self) -> Any:
        given: dict[str, int] = {}
        budget, preempted, index = self.config.max_num_batched_tokens, False, 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            tokens = min(budget, request.num_tokens - request.num_computed_tokens)
            if tokens <= 0 or self.ends(request):
                index += 1
                continue
            while self.missing(request, request.num_computed_tokens + tokens) > self.free_blocks:
                victim = self.victim()
                preempted = True
                index -= self.running.index(victim) < index
                self.running.remove(victim)
                budget += given.pop(victim.request_id, 0)
                self.kv_cache_manager.free(victim)
                victim.num_computed_tokens = 0
                self.waiting.insert(0, victim)
                if victim is request:
                    break
            else:
                self.take(request, request.num_computed_tokens + tokens)
                given[request.request_id] = tokens
                budget -= tokens
                index += 1
                continue
            break
        while self.waiting and budget > 0 and not preempted and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            tokens = min(budget, request.num_tokens)
            if self.missing(request, request.num_tokens) > self.free_blocks:
                break
            self.running.append(self.waiting.pop(0))
            self.take(request, tokens)
            given[request.request_id] = tokens
            budget -= tokens
        for id, tokens in given.items():
            request = self.requests[id]
            request.num_computed_tokens += tokens
            if request.num_computed_tokens == request.num_tokens:
                request.placeholders += 1
        return SimpleNamespace(num_scheduled_tokens=given, scheduled_spec_decode_tokens={})

    def update(self, output: Any) -> None:
        for id, tokens in zip(output.req_ids, output.sampled_token_ids):
            request = self.requests.get(id)
            if request is None or not tokens:
                continue
            request.placeholders -= 1
            request.outputs += tokens
            stops = tokens[0] in request.params.stop_token_ids
            if (
                stops
                or len(request.outputs) >= request.params.max_tokens
                or (request.num_prompt_tokens + len(request.outputs) >= self.config.max_model_len)
            ):
                self.finish(request)

    def finish(self, request: Any) -> None:
        del self.requests[request.request_id]
        (self.running if request in self.running else self.waiting).remove(request)
        self.kv_cache_manager.free(request)

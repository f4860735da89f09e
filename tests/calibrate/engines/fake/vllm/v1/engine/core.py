"""The engine: its step functions, with and without a queue of batches."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.scheduler import Scheduler


class EngineCore:
    def __init__(self, vllm_config: Any, executor_class: Any, log_stats: bool) -> None:
        self.model_executor = executor_class(vllm_config)
        assert self.model_executor.collective_rpc("get_kv_cache_spec")[0]["layer 0"].block_size
        assert self.model_executor.collective_rpc("initialize_from_config", args=([],)) == []
        self.scheduler = (vllm_config.scheduler_config.scheduler_cls or Scheduler)(vllm_config)
        self.request_block_hasher = None
        self.batch_queue: list[Any] = []
        self.step_fn = self.step_with_batch_queue if vllm_config.scheduler_config.async_scheduling else self.step

    def add_request(self, request: Any) -> None:
        self.scheduler.add_request(request)

    def abort_requests(self, ids: list[str]) -> None:
        for id in ids:
            self.scheduler.finish(self.scheduler.requests[id])

    def step(self) -> None:
        if self.scheduler.requests:
            self.scheduler.update(self.model_executor.execute_model(self.scheduler.schedule()))

    def step_with_batch_queue(self) -> None:
        if self.scheduler.requests:
            output = self.scheduler.schedule()
            future = self.model_executor.execute_model(output, non_block=True)
            if output.num_scheduled_tokens:
                future = self.model_executor.sample_tokens(None, non_block=True)
            self.batch_queue.insert(0, future)
            if len(self.batch_queue) < 2:
                return
        if self.batch_queue:
            self.scheduler.update(self.batch_queue.pop().result())

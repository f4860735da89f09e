"""Drive real vLLM 0.32 scheduler classes with a pretended model; runs with the Python of vLLM, see test_vllm_inside.py.

Standard input: one JSON line per recording. Standard output: one JSON line with its steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import vllm.v1.core.sched.scheduler as scheduler_module
from servesim.calibrate.adapter import vllm_scheduler
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

STOP = 3  # token


class Config(SimpleNamespace):
    """A configuration in which every other setting is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def hash_of(value: Any) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


def make_scheduler(knobs: dict[str, Any], kind: str, clock: Any) -> Any:
    """Return a scheduler with the settings of a recording."""
    size, length, tokens = knobs["block_size"], knobs["max_model_len"], knobs["max_num_batched_tokens"]
    chunked, is_async = knobs.get("chunked", False), knobs.get("async_scheduling", False)
    scheduling = Config(
        max_num_seqs=knobs["max_num_seqs"], max_num_batched_tokens=tokens, max_model_len=length,
        long_prefill_token_threshold=knobs.get("long_prefill_token_threshold", 0),
        long_prefill_token_threshold_adaptive=knobs.get("long_prefill_token_threshold_adaptive", False),
        enable_chunked_prefill=chunked, policy=knobs.get("policy", "fcfs"), async_scheduling=is_async,
        scheduler_reserve_full_isl=knobs.get("reserve_full_isl", True), watermark=knobs.get("v1_watermark", 0.0),
        max_num_active_seqs=knobs.get("max_num_active_seqs"), prefill_schedule_interval=1,
        max_num_encoder_input_tokens=0, encoder_cache_size=0, runner_type="generate",
    )  # fmt: skip
    caching, blocks = knobs.get("enable_prefix_caching", False), knobs["num_blocks"] + 1
    parallel = Config(
        data_parallel_rank=0, decode_context_parallel_size=1, prefill_context_parallel_size=1,
        pipeline_parallel_size=1, world_size=1, data_parallel_size=1, data_parallel_index=0,
    )  # fmt: skip
    config = Config(
        scheduler_config=scheduling, parallel_config=parallel, observability_config=Config(),
        cache_config=Config(block_size=size, num_gpu_blocks=blocks, enable_prefix_caching=caching),
        model_config=Config(max_model_len=length), aux_output_config=Config(), ec_manager_config=MagicMock(),
        num_speculative_tokens=0, num_prefill_lookahead_tokens=0, num_lookahead_tokens=0,
        max_concurrent_batches=1 + is_async, max_in_flight_tokens=tokens * (1 + is_async), use_v2_model_runner=False,
    )  # fmt: skip
    spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    structured, registry = MagicMock(), MagicMock()
    structured.should_advance.return_value = False
    registry.supports_multimodal_inputs.return_value = False
    vllm_scheduler.PolicyDecisions.clock = staticmethod(clock)
    return getattr(vllm_scheduler, kind)(
        config, cache, structured, block_size=size, hash_block_size=size, mm_registry=registry, log_stats=True
    )


class Texts:
    """The tokens of the requests of a recording."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.content, self.outputs = data.get("content", {}), data.get("output_content", {})
        self.prompts = {row[0]: row[2] for row in data["requests"]}
        self.ids: dict[Any, int] = {}

    def token(self, text: str, place: int) -> int:
        return self.ids.setdefault((text, place), len(self.ids) + 10)

    def answer(self, id: str) -> str:
        return self.outputs.get(id, f"output:{id}")

    def prompt(self, id: str) -> list[int]:
        if id not in self.content:
            return [self.token(f"prompt:{id}", place) for place in range(self.prompts[id])]
        tokens: list[int] = []
        for name, count in self.content[id]:
            kind, _, other = name.partition(":")
            if kind == "prompt" and other != id:
                tokens += self.prompt(other)[:count]
            else:
                text = self.answer(other) if kind == "output" else name
                tokens += [self.token(text, place) for place in range(count)]
        return tokens


class Run:
    """One recording, run again."""

    def __init__(self, data: dict[str, Any], kind: str) -> None:
        self.data, self.knobs, self.texts, self.now = data, data["meta"]["knobs"], Texts(data), 0
        self.cost, self.rows, self.open = data["meta"]["cost"], [], deque()
        self.scheduler = make_scheduler(self.knobs, kind, lambda: float(self.now))
        caching = self.knobs.get("enable_prefix_caching", False)
        self.hasher = get_request_block_hasher(self.knobs["block_size"], hash_of) if caching else None
        self.outputs = {str(row[0]): row[3] for row in data["requests"]}
        self.limits = {str(row[0]): data.get("max_tokens", {}).get(row[0], row[3]) for row in data["requests"]}
        self.coming = deque(sorted(data["requests"], key=lambda row: row[1]))
        self.device = 0  # when it is free

    def request(self, id: str, arrival: int, _: int, output: int, priority: int) -> Request:
        limit, ends = self.limits[id], self.limits[id] == output
        stops = None if ends else [STOP]
        params = SamplingParams(max_tokens=limit, ignore_eos=ends, temperature=0, stop_token_ids=stops)
        params.update_from_generation_config({}, None if ends else STOP)
        return Request(
            request_id=id, prompt_token_ids=self.texts.prompt(id), sampling_params=params, pooling_params=None,
            arrival_time=float(arrival), priority=priority, block_hasher=self.hasher,
        )  # fmt: skip

    def play(self) -> list[dict[str, Any]]:
        """Run all requests, as the loop of vLLM's engine does: `step`, or `step_with_batch_queue`."""
        scheduler, most_open = self.scheduler, 1 + self.knobs.get("async_scheduling", False)
        while self.coming or scheduler.requests or self.open:
            if not scheduler.requests and not self.open:
                self.now = max(self.now, self.coming[0][1])
            while self.coming and self.coming[0][1] <= self.now:
                scheduler.add_request(self.request(*self.coming.popleft()))
            if scheduler.has_requests():
                ran = self.schedule()
                if len(self.open) < most_open and (ran or scheduler.has_requests()):
                    continue
            self.deliver()
        return self.rows

    def schedule(self) -> bool:
        """Schedule one step; return whether it runs the model."""
        scheduler, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        before = {entry.request_id for entry in scheduler.running}
        output = scheduler.schedule()
        tokens, sched, places = output.num_scheduled_tokens, [], {}
        for entry in scheduler.running:
            if entry.request_id in tokens:
                count = tokens[entry.request_id]
                start = entry.num_computed_tokens - count
                samples = not entry.is_prefill_chunk
                decodes = samples and count == 1 and start >= entry.num_prompt_tokens
                sched.append([entry.request_id, count, "D" if decodes else "P"])
                if samples:
                    places[entry.request_id] = start + count - entry.num_prompt_tokens
        admitted = [entry for entry in scheduler.running if entry.request_id not in before]
        row = {
            "t": self.now,
            "sched": sched,
            "preempted": sorted(entry.request_id for entry in scheduler.waiting if entry.request_id in before),
            "cached": [[entry.request_id, entry.num_computed_tokens - tokens[entry.request_id]] for entry in admitted],
            "free_gpu": pool.get_num_free_blocks(),
        }
        if sched or row["preempted"]:
            self.rows.append(row)
        prefill = sum(count for _, count, kind in sched if kind == "P")
        decodes = sum(kind == "D" for *_, kind in sched)
        start = end = max(self.now, self.device)
        if sched:
            end += self.cost["c0"] + self.cost["per_prefill_token"] * prefill + self.cost["per_decode_seq"] * decodes
            self.device = end
        elif not self.open:
            end += 1  # the engine sleeps for a moment
        self.open.append((output, places, end))
        return bool(sched)

    def deliver(self) -> None:
        """Give the result of the oldest step to the scheduler."""
        output, places, end = self.open.popleft()
        self.now = max(self.now, end)
        ids, values = list(output.num_scheduled_tokens), []
        for id in ids:
            token = self.texts.token(self.texts.answer(id), places[id]) if id in places else None
            if id in places and places[id] + 1 == self.outputs[id] != self.limits[id]:
                token = STOP
            values.append([] if token is None else [token])
        result = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={id: place for place, id in enumerate(ids)}, sampled_token_ids=values,
            logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
        )  # fmt: skip
        self.scheduler.update_from_output(output, result)


def main() -> None:
    init_none_hash(hash_of)
    scheduler_module.time = SimpleNamespace(monotonic=lambda: 0.0, time=lambda: 0.0)
    for line in sys.stdin:
        job = json.loads(line)
        os.environ["SERVESIM_POLICY"] = json.dumps(job.get("policy", {}))
        try:
            result: Any = Run(job["recording"], job["scheduler"]).play()
        except SystemExit as error:
            result = str(error)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

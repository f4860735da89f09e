"""Record the steps of a vLLM server: a scheduler class for its option --scheduler-cls.

    export SERVESIM_STEPS=steps.jsonl
    vllm serve MODEL --scheduler-cls servesim.calibrate.adapter.vllm_recorder.recording_scheduler

vLLM's own scheduler decides. The file is a step log: a first line with the version and the settings of the server, then
one line per step with its shape, the requests that arrived before it and that it preempted, the time of its decision
and the time of its result. This module imports nothing of servesim, so a server can load it as a single file.
"""

from __future__ import annotations

import json
import os
import queue
import re
import threading
import time
from importlib import import_module
from typing import Any

FILE_VARIABLE = "SERVESIM_STEPS"
SCHEDULERS = "vllm.v1.core.sched"  # package
SECTIONS = {  # of vLLM's configuration, and the settings to write: not all, because some are secret
    "scheduler": (),  # all
    "cache": (),
    "parallel": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    "model": ("model", "max_model_len", "quantization", "enforce_eager"),
    "speculative": ("method", "num_speculative_tokens"),
}
FEATURES = ("speculative", "lora", "kv_transfer", "ec_transfer")  # sections that are None if the feature is off
PLAIN = (bool, int, float, str, type(None))
# How vLLM's API server extends the id that a client sends as X-Request-Id; the random end may be switched off.
CLIENT_ID = re.compile(r"(?:chat)?cmpl-(.+?)(?:-\d+)?(?:-[0-9a-f]{8})?")


def recording_scheduler(vllm_config: Any, *args: Any, **options: Any) -> Any:
    """Return vLLM's scheduler for these settings, which also records its steps."""
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        raise ValueError(f"{FILE_VARIABLE}: expected the file to write the steps to, got no such environment variable")
    base = vllm_scheduler(vllm_config)
    recorder = type(f"Recording{base.__name__}", (StepRecorder, base), {})(vllm_config, *args, **options)
    recorder.open_log(path)
    return recorder


def vllm_scheduler(vllm_config: Any) -> Any:
    """Return the scheduler class that vLLM has for these settings. Only here it is imported."""
    is_async = getattr(vllm_config.scheduler_config, "async_scheduling", False)
    module, name = ("async_scheduler", "AsyncScheduler") if is_async else ("scheduler", "Scheduler")
    return getattr(import_module(f"{SCHEDULERS}.{module}"), name)


class StepRecorder:
    """The calls of the engine to its scheduler, with their times. A subclass of vLLM's scheduler is its other base."""

    def open_log(self, path: str) -> None:
        """Write the header. A thread writes the lines: the engine does not wait for the file."""
        self.steps = 0
        self.arrived: list[tuple[str, float, float]] = []  # since the last step: id, now, the stamp of the front end
        self.unfinished: dict[int, dict[str, Any]] = {}  # steps without a result, by the identity of their decision
        self.lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.lines.put({"header": describe_engine(self)})
        log = open(path, "w", encoding="utf-8")  # noqa: SIM115  open as long as the server runs
        threading.Thread(target=write_lines, args=(log, self.lines), daemon=True, name="servesim-steps").start()

    def add_request(self, request: Any, *args: Any, **options: Any) -> Any:
        self.arrived.append((request.request_id, time.monotonic(), request.arrival_time))
        return super().add_request(request, *args, **options)  # type: ignore[misc]

    def schedule(self, *args: Any, **options: Any) -> Any:
        start = time.monotonic()
        decision = super().schedule(*args, **options)  # type: ignore[misc]
        if decision.total_num_scheduled_tokens:
            self.steps += 1
            arrived, self.arrived = self.arrived, []
            self.unfinished[id(decision)] = {
                "step": self.steps, "start": start, "waiting": len(self.waiting), "arrived": arrived,  # type: ignore[attr-defined]
                "preempted": sorted(getattr(decision, "preempted_req_ids", None) or ()),
                **step_shape(decision, self.requests),  # type: ignore[attr-defined]
            }  # fmt: skip
        return decision

    def update_from_output(self, decision: Any, output: Any, *args: Any, **options: Any) -> Any:
        end = time.monotonic()
        line = self.unfinished.pop(id(decision), None)
        for row in () if line is None else line.get("verified", ()):  # vLLM removes those after the end of an answer
            row.append(max(0, len(output.sampled_token_ids[output.req_id_to_index[row[0]]]) - 1))
        outputs = super().update_from_output(decision, output, *args, **options)  # type: ignore[misc]
        if line is not None:
            self.lines.put({**line, "end": end})
        return outputs


def step_shape(decision: Any, requests: Any) -> dict[str, Any]:
    """Return the prompt chunks of a step, [request, tokens, cached tokens], the decoding requests and their context.

    With speculative decoding also drafted tokens, and `verified`: [request, output tokens before, drafts, accepted].
    """
    chunks, rows, context = [], 0, 0
    guesses = {id: len(ids) for id, ids in (getattr(decision, "scheduled_spec_decode_tokens", None) or {}).items()}
    for id, count in decision.num_scheduled_tokens.items():
        cached = requests[id].num_computed_tokens - count  # the scheduler has already added them
        count -= guesses.get(id, 0)
        if count == 1 and cached >= requests[id].num_prompt_tokens:
            rows += 1
            context += cached
        else:
            chunks.append([id, count, cached])
    shape = {"batch": chunks, "decode_rows": rows, "context": context}
    if not guesses:
        return shape
    verified = [[id, requests[id].num_output_tokens, count] for id, count in guesses.items()]
    return {**shape, "drafts": sum(guesses.values()), "verified": verified}


def describe_engine(scheduler: Any) -> dict[str, Any]:
    """Return what the log says about the server: version, settings, KV blocks, model and device."""
    config = scheduler.vllm_config
    sections = {
        name: plain_values(getattr(config, f"{name}_config", None), chosen) for name, chosen in SECTIONS.items()
    }
    sizes = config.model_config.hf_config.to_dict()
    return {
        "engine": "vllm",
        "version": import_module("vllm").__version__,
        **sections,
        "features": [name for name in FEATURES if getattr(config, f"{name}_config", None) is not None],
        "num_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
        "block_size": scheduler.block_size,
        "model_sizes": {name: size for name, size in sizes.items() if type(size) is int},
        "device": import_module("vllm.platforms").current_platform.get_device_name(),
    }


def plain_values(config: Any, chosen: tuple[str, ...]) -> dict[str, Any]:
    """Return the numbers and texts of one section of the configuration; it is None if a feature is off."""
    values = {name: value for name, value in getattr(config, "__dict__", {}).items() if isinstance(value, PLAIN)}
    return {name: value for name, value in values.items() if not chosen or name in chosen}


def write_lines(log: Any, lines: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Write every line when it comes: a killed server loses the running step only."""
    while True:
        log.write(json.dumps(lines.get(), default=str) + "\n")
        log.flush()


def client_id(id: str) -> Any:
    """Return the id that the client gave, as traces have it: a number if it is one."""
    match = CLIENT_ID.fullmatch(id)
    name = match[1] if match else id
    return int(name) if name.isascii() and name.isdecimal() and str(int(name)) == name else name

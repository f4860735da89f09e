"""The decision log of a vLLM V1 server, in the format of `sim run --decisions`: one JSON line per step.

A line is written when its step returns, so a killed server loses the steps in flight only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional, TextIO

from .vllm_recorder import client_id

LOG_VARIABLE = "SERVESIM_DECISIONS"  # environment: file of the decision log


def client_ids(ids: Iterable[str]) -> list[Any]:
    return list(map(client_id, ids))


class Before(NamedTuple):
    """What a step changes: the running queue, and the prompts in it that are not complete."""

    time: float
    running: list[str]
    prompts: set[str]


class DecisionLog:
    """Writes one line for every step that runs or preempts requests."""

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.steps = 0
        self._origin: Optional[float] = None  # arrival of the first request: time 0 of the log
        self._seen: set[str] = set()
        self._started: dict[int, dict[str, Any]] = {}  # lines of steps that have not returned, by their output

    def before(self, scheduler: Any) -> Before:
        """Return what must be known before vLLM schedules a step."""
        prompts = {entry.request_id for entry in scheduler.running if entry.is_prefill_chunk}
        return Before(time.time(), [entry.request_id for entry in scheduler.running], prompts)

    def scheduled(self, scheduler: Any, before: Before, output: Any) -> None:
        """Note a step that vLLM has scheduled."""
        arrived = [entry for id, entry in scheduler.requests.items() if id not in self._seen]
        if self._origin is None and arrived:
            self._origin = arrived[0].arrival_time
        in_order = getattr(scheduler, "in_order", list)  # stock vLLM has them in its own order
        waiting = [entry.request_id for entry in in_order(scheduler.waiting)]
        running = [entry.request_id for entry in scheduler.running]
        preempted = [entry.request_id for entry in scheduler.waiting if entry.request_id in before.running][::-1]
        tokens = output.num_scheduled_tokens
        if not tokens and not preempted:
            return
        self._seen = set(scheduler.requests)
        admitted = [id for id in running if id not in before.running]
        prompts = [id for id in tokens if id in before.prompts or id in admitted]
        kind = (
            "idle" if not tokens else "decode" if not prompts else "prefill" if len(prompts) == len(tokens) else "mixed"
        )
        line = {
            "step": self.steps,
            "t": before.time - (self._origin or 0.0),
            "kind": kind,
            "chunks": [[client_id(id), count] for id, count in tokens.items()],
            "prompts": client_ids(prompts),
            "preempted": [[client_id(id), "recompute"] for id in preempted],
            "swapped_in": [],
            "rejected": [],
            "released": [],
            "free": free_blocks(scheduler),
            "host_free": 0,
            "waiting": client_ids(waiting),
            "running": client_ids(running),
            "swapped": [],
            "arrived": client_ids(entry.request_id for entry in arrived),
            "admitted": client_ids(admitted),
        }
        if scheduler.kv_cache_manager.enable_caching:
            start = {id: scheduler.requests[id].num_computed_tokens - tokens[id] for id in admitted}
            line["cached"] = [[client_id(id), count] for id, count in start.items()]
        self._started[id(output)] = line
        self.steps += 1

    def returned(self, scheduler: Any, output: Any) -> None:
        """Write the line of a step whose result vLLM has processed."""
        line = self._started.pop(id(output), None)
        if line is None:
            return
        finished = client_ids(id for id in output.num_scheduled_tokens if id not in scheduler.requests)
        end = {"t_end": time.time() - (self._origin or 0.0), "free_after": free_blocks(scheduler), "finished": finished}
        self.file.write(json.dumps({**line, **end}) + "\n")
        self.file.flush()


def free_blocks(scheduler: Any) -> int:
    """Return the number of free KV blocks."""
    free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return free


def open_log() -> Optional[DecisionLog]:
    """Return the log that the environment names; None without one."""
    path = os.environ.get(LOG_VARIABLE)
    return DecisionLog(open(path, "a", encoding="utf-8")) if path else None

"""The policy `engine`: the scheduler of an installed engine decides, in a worker process with the user's interpreter.

servesim gives the workload, the costs, the clock and the metrics. The engine counts its own blocks and finds cached
tokens itself. One worker per process serves all runs, because the import of an engine takes many seconds.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Optional

from servesim.calibrate.device.worker_client import START_TIMEOUT_S, Worker, WorkerFailed
from servesim.config.layers import texts_in
from servesim.config.registry import ENGINE
from servesim.config.user_code import find_file, names_file, require_access
from servesim.core import Chunk, Plan, Policy, PolicyError, Preemption, Request, View
from servesim.engine.step import Verified

from .rules import InstalledRules

ENGINES = {"vllm": "vLLM"}
PLAIN_FLAGS = ("scheduling_policy",)  # texts that name no code
WORKERS: dict[tuple[int, str], Worker] = {}  # by process and engine: a forked process starts its own
SETTINGS: dict[tuple[Optional[str], str], dict[str, Any]] = {}  # what the engine said, by its interpreter and its flags


@dataclass(frozen=True)
class EnginePolicy(Policy):
    """The scheduler of an engine that is installed on this machine. Its flags are further fields."""

    engine: Literal["vllm"] = "vllm"  # engine: vllm, of the interpreter in SERVESIM_VLLM_PYTHON (default: this one)
    flags: tuple[Any, ...] = ()  # flags of the engine, as pairs; write them as fields, e.g. max_num_seqs: 64
    scheduler_cls: Optional[str] = None  # your scheduler class: package.module.Class, or FILE.py:Class
    order: Literal["arrival"] = "arrival"  # waiting queue: the engine sorts it
    max_wait: Literal[None] = None  # the engine has no such setting

    @property
    def title(self) -> str:
        """Name and version of the installed engine."""
        return f"{ENGINES[self.engine]} {self.settings()['version']}"

    def rules(self) -> InstalledRules:
        return InstalledRules(self.title, self.settings())

    def settings(self) -> dict[str, Any]:
        """Return what the engine makes of the flags. It starts the worker."""
        flags = self.all_flags()
        key = os.environ.get(f"SERVESIM_{self.engine.upper()}_PYTHON"), repr(flags)
        if key not in SETTINGS:
            SETTINGS[key] = call(self.engine, "engine_settings", flags=flags)
        return SETTINGS[key]

    def all_flags(self) -> dict[str, Any]:
        """Return the flags of the engine, which need the permission to run code: any of their texts may name some."""
        flags, name = dict(self.flags), self.scheduler_cls
        named = {key: value for key, value in flags.items() if key not in PLAIN_FLAGS}
        require_access(ENGINE, [ENGINE, *texts_in([named, name]).values()])
        if name is not None:
            path, _, attribute = name.rpartition(":")
            flags["scheduler_cls"] = f"{find_file(path, name)}:{attribute}" if names_file(name) else name
        return flags

    def initial_state(self) -> Session:
        return Session(self)

    def decide(self, view: View) -> Plan:
        plan: Plan = view.state.decide(view)
        return plan

    def remark(self, state: Session) -> str:
        speed = state.decisions / state.seconds if state.seconds else 0.0
        return f"{self.title} decided {state.decisions:,} steps, {speed:,.0f} per second"


def call(engine: str, name: str, **args: Any) -> Any:
    """Call the worker of an engine. Start it if there is none. Its failure is one line."""
    key = os.getpid(), engine
    try:
        if key not in WORKERS:
            WORKERS[key] = Worker(engine)
            atexit.register(close, key)
        return WORKERS[key].call(name, START_TIMEOUT_S, **args)
    except WorkerFailed as failed:
        close(key)
        raise PolicyError(f"policy engine: {failed}") from None


def close(key: tuple[int, str]) -> None:
    """End a worker of this process."""
    if key[0] == os.getpid() and key in WORKERS:
        WORKERS.pop(key).close()


class Session:
    """One run of an engine: what it knows of the requests, and the steps that it decided."""

    def __init__(self, policy: EnginePolicy) -> None:
        self.policy = policy
        self.decisions = 0
        self.seconds = 0.0  # that decisions took
        # The rules set these two:
        self.windows: list[Optional[int]] = []  # of the KV cache groups
        self.verifies = False  # how many tokens a row gets is known when its step returns
        self._requests: list[Request] = []  # by their number in the engine
        self._live: dict[Request, int] = {}  # those that are not done, as the engine knows
        self._names: dict[Hashable, int] = {}  # named texts
        self._steps = 0
        # steps whose results the engine does not have, and their rows: a request, its new tokens, its next drafts
        self._out: list[tuple[int, list[tuple[int, int, int]]]] = []
        self._returned = 0  # steps that have returned

    def decide(self, view: View) -> Plan:
        """Return the decision of the engine as a plan."""
        start = time.perf_counter()
        if not self.decisions:
            call(
                self.policy.engine, "engine_start", flags=self.policy.all_flags(), blocks=view.pool.total,
                block_size=view.pool.block_size, max_model_len=view.max_model_len, windows=self.windows,
            )  # fmt: skip
        results = [given for given in self._out if given[0] <= self._returned]
        self._out = self._out[len(results) :]
        arrivals = self._arrivals(view)
        aborts = self._aborted(view)  # it counts the requests that the engine knows: with those that arrive now
        reply = call(
            self.policy.engine, "engine_decide", now=view.now, results=results, arrivals=arrivals, aborts=aborts
        )
        self.decisions += 1
        plan = self._plan(reply)
        self.seconds += time.perf_counter() - start
        return plan

    def note_results(self, rows: Sequence[Verified]) -> None:
        """Note that a step has returned: with drafts, those that were accepted, and those for the next step."""
        self._returned += 1
        given = next(given for step, given in self._out if step == self._returned)
        given += [(self._live[row.request], 1 + row.accepted, row.request.drafts) for row in rows]

    def _aborted(self, view: View) -> list[int]:
        """Return requests that have left although the engine does not know it."""
        if len(self._live) <= len(view.waiting) + len(view.running):
            return []
        gone = [request for request in self._live if request.status == "done"]
        numbers = [self._live.pop(request) for request in gone]
        return [number for number, request in zip(numbers, gone) if request.outcome != "finished"]

    def _arrivals(self, view: View) -> list[dict[str, Any]]:
        """Return new requests. They are at the end of the waiting queue."""
        new: list[Request] = []
        for request in reversed(view.waiting):
            if request in self._live:
                break
            new.append(request)
        rows = []
        for request in reversed(new):
            number = self._live[request] = len(self._requests)
            self._requests.append(request)
            content = request.content
            pieces = [(("prompt", number), request.prompt)] if content is None else content.pieces
            answer = None if content is None else content.answer
            rows.append({
                "number": number, "arrival": request.arrival, "priority": request.priority, "limit": request.limit,
                "stop": request.stop_at if request.stop_at < request.max_tokens else None,
                "text": [(self._name(name), tokens) for name, tokens in pieces],
                "answer": self._name(("answer", number) if answer is None else answer),
            })  # fmt: skip
        return rows

    def _name(self, name: Hashable) -> int:
        return self._names.setdefault(name, len(self._names))

    def _plan(self, reply: dict[str, Any]) -> Plan:
        rows: list[tuple[int, int, int]] = []
        chunks: list[Chunk] = []
        for number, tokens, cached, drafts, blocks in reply["scheduled"]:
            request = self._requests[number]
            is_new = request.status != "running"
            if not is_new and (cached != request.cached or tokens - drafts > request.pending):
                raise PolicyError(
                    f"policy engine: {self.policy.title} computes tokens {cached} to {cached + tokens} of request "
                    f"{request.id}, expected {request.cached} to at most {request.length}; this is not simulated"
                )
            chunks.append(Chunk(request, tokens, blocks, cached if is_new else 0, drafts))
            if cached + tokens == request.length and not self.verifies:
                rows.append((number, 1, 0))
        if chunks:
            self._steps += 1
            self._out.append((self._steps, rows))
        preempt = [Preemption(self._requests[number]) for number in reply["preempted"]]
        return Plan(preempt=preempt, chunks=chunks, state=self, extra=reply["free"])

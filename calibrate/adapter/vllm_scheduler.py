"""Run a servesim policy inside vLLM V1: the policy decides, vLLM's KV-cache manager and executor carry it out.

    SERVESIM_POLICY='{"name": "vllm-v1", "order": "shortest-output"}' SERVESIM_DECISIONS=decisions.jsonl \\
        vllm serve MODEL --scheduler-cls servesim.calibrate.adapter.vllm_scheduler.PolicyScheduler

How it works. vLLM's own `schedule` still runs, so blocks, prefix cache and messages to the executor are vLLM's. It sees
a waiting queue with only the requests that the plan admits, and asks the adapter for the tokens of each request at a
point where vLLM itself may lower them (`_reserve_prefill_lookahead`). A preemption takes place when vLLM comes to a
request that lacks blocks, as in stock vLLM. What vLLM has scheduled is then compared with the plan.

`LoggedScheduler` only writes the decision log of stock vLLM.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from typing import Any

from servesim.core import BadInput, Plan, Policy, Reorder, Request, Stuck
from servesim.engine.rules import rules_of
from servesim.policies.vllm_v1 import VLLMV1

from .policy_state import POLICY_VARIABLE, fields_from, make_policy
from .vllm_decisions import open_log
from .vllm_recorder import SCHEDULERS, vllm_scheduler
from .vllm_view import VllmState, blocks_of

PLANNING_POINT = "_reserve_prefill_lookahead"  # vLLM's scheduler asks it for the tokens of a request
LIMITS = {"max_num_seqs": "max_num_running_reqs", "max_num_batched_tokens": "max_num_scheduled_tokens"}
NOT_POSSIBLE = {  # fields of a plan that vLLM has no operation for
    "release": "it frees the blocks of a finished request at once",
    "swap_in": "it has no swapped queue",
    "admit": "it admits a request with its first tokens only",
    "reject": "its scheduler refuses no request",
    "padding_rows": "its executor adds the padding",
    "extra": "it does not have the rules of another engine",
}


def server_fields(scheduler: Any, kind: type[Policy]) -> dict[str, Any]:
    """Return the server's own settings, as fields of a policy: all of them for vllm-v1, else the two limits."""
    values = {name: getattr(scheduler, limit) for name, limit in LIMITS.items()}
    if issubclass(kind, VLLMV1):  # its fields have the names of vLLM
        values = {**vars(scheduler.scheduler_config), **values}
        values["enable_prefix_caching"] = scheduler.kv_cache_manager.enable_caching
        values["version"] = importlib.import_module("vllm").__version__.partition("+")[0]
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def policy_for(scheduler: Any, text: str) -> Policy:
    """Return the policy of a server. What the text does not set has the value of the server's flag."""
    kind, chosen = fields_from(text, "vllm-v1")
    policy = make_policy(kind, {**server_fields(scheduler, kind), **chosen})
    rules = rules_of(policy)
    lacks = {
        "slots": rules.running_order == "slot",
        "finished requests that hold blocks": rules.frees_late,
        "a memory without blocks": not policy.uses_block_pool,
        "a prefix cache of another kind": rules.has_prefix_cache and not rules.may_have_host_cache,
        "--no-async-scheduling": scheduler.scheduler_config.async_scheduling and rules.steps_in_flight < 2,
    }
    if any(lacks.values()):
        feature = next(name for name, needed in lacks.items() if needed)
        raise BadInput(f"{POLICY_VARIABLE}: the policy needs {feature}, and this vLLM runs without")
    for name, limit in LIMITS.items():
        value, most = getattr(policy, name, None), getattr(scheduler, limit)
        if value is not None and value > most:
            flag = name.replace("_", "-")
            raise BadInput(f"{POLICY_VARIABLE}: {name}: expected at most {most}, the --{flag} of vLLM, got {value}")
    caching = scheduler.kv_cache_manager.enable_caching
    if caching != rules.has_prefix_cache:
        which, flag = ("the policy", "--no-") if caching else ("vLLM", "--")
        raise BadInput(f"{POLICY_VARIABLE}: {which} has no prefix cache; start vLLM with {flag}enable-prefix-caching")
    return policy


def check_server(scheduler: Any) -> None:
    """Refuse servers whose scheduler does more than a policy can decide."""
    if not hasattr(scheduler, PLANNING_POINT):
        raise BadInput(f"adapter: vLLM's scheduler has no {PLANNING_POINT}; expected vLLM 0.32 or a similar version")
    config = scheduler.vllm_config
    features = {
        "speculative decoding": config.speculative_config,
        "LoRA": config.lora_config,
        "a KV connector": config.kv_transfer_config,
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
        "an encoder": scheduler.is_encoder_decoder,
        "several kinds of attention": len(scheduler.kv_cache_config.kv_cache_groups) > 1,
    }
    for name, used in features.items():
        if used:
            raise BadInput(f"adapter: the policy cannot schedule {name}; start vLLM without it")


def planned_tokens(plan: Plan, running: Iterable[Request]) -> dict[str, int]:
    """Return the tokens of each request of a plan, by id; raise BadInput if vLLM has no such operation."""
    for name, reason in NOT_POSSIBLE.items():
        if getattr(plan, name):
            raise BadInput(f"vLLM cannot run a plan with {name}: {reason}")
    for request, mode, queue, *_ in plan.preempt:
        if mode != "recompute" or queue == "swapped":
            raise BadInput(f"vLLM cannot preempt {request.id} with mode {mode} to queue {queue}: it only recomputes")
    preempted = {preemption.request for preemption in plan.preempt}
    for chunk in plan.chunks:
        if chunk.request in preempted:
            raise BadInput(f"vLLM cannot preempt {chunk.request.id} and run it in the same step")
    decoding = [request.id for request in running if request.decodes and request not in preempted]
    return {**dict.fromkeys(decoding if plan.decode else (), 1), **{c.request.id: c.tokens for c in plan.chunks}}


def refusal(error: Exception) -> SystemExit:
    """Return what ends the process of the engine: one line, without a traceback."""
    return SystemExit(f"servesim: {error}")


def new_queue(entries: Iterable[Any] = ()) -> Any:
    """Return a waiting queue of vLLM in the order of the entries."""
    return importlib.import_module(f"{SCHEDULERS}.request_queue").FCFSRequestQueue(entries)


Base: Any = object  # in the classes that vLLM loads, its scheduler is the last base


class LoggedDecisions(Base):  # type: ignore[misc]
    """Part of a scheduler class: writes the decision log."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.decision_log = open_log()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        log = self.decision_log
        if log is None:
            return super().schedule(*args, **kwargs)
        before = log.before(self)
        output = super().schedule(*args, **kwargs)
        log.scheduled(self, before, output)
        return output

    def update_from_output(self, output: Any, result: Any) -> Any:
        messages = super().update_from_output(output, result)
        if self.decision_log is not None:
            self.decision_log.returned(self, output)
        return messages


class PolicyDecisions(Base):  # type: ignore[misc]
    """Part of a scheduler class: a policy decides."""

    clock = staticmethod(time.time)  # as vLLM's arrival times

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            check_server(self)
            policy = policy_for(self, os.environ.get(POLICY_VARIABLE, "{}"))
        except BadInput as error:
            raise refusal(error) from None
        self.policy_state = VllmState(policy)
        self.waiting, self.preempted = new_queue(), new_queue()  # the policy sorts
        # From now on these are decisions of the policy.
        self.max_num_active_reqs, self.scheduler_reserve_full_isl = self.max_num_running_reqs, False
        self.kv_cache_manager.watermark_blocks = self.scheduler_config.long_prefill_token_threshold = 0
        self.tokens: dict[str, int] = {}  # of the requests of the plan
        self.reserved: dict[str, int] = {}  # blocks that they hold then; 0: as many as their tokens need
        self.victims: list[Any] = []  # of the plan, not preempted yet
        print(f"servesim now schedules vLLM: {policy}", file=sys.stderr, flush=True)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Let the policy plan a step, and vLLM run it."""
        if self.pause_state.name == "PAUSED_ALL":
            return super().schedule(*args, **kwargs)
        ready = [entry for entry in self.waiting if self.is_ready(entry)]
        self.decided = self.clock()
        view = self.policy_state.read_state(self, ready, self.decided)
        try:
            plan = self.policy_state.decide(view)
            self.tokens = planned_tokens(plan, view.running)
            self.reserved = {chunk.request.id: chunk.blocks for chunk in plan.chunks}
            waiting = self.start_plan(plan)
            output = super().schedule(*args, **kwargs)
            self.end_plan(plan, waiting, output.num_scheduled_tokens)
        except (BadInput, Stuck) as error:
            raise refusal(error) from None
        return output

    def in_order(self, waiting: Iterable[Any]) -> Iterable[Any]:
        """Return waiting requests in the order of the policy; vLLM's queue has that of arrival."""
        return self.policy_state.in_order(waiting, self.decided)

    def is_ready(self, entry: Any) -> bool:
        """Whether vLLM itself could admit a waiting request."""
        in_flight = entry.num_stale_output_tokens and not entry.drop_stale_output
        return self.pause_state.name == "UNPAUSED" and self._handle_blocked_waiting_request(entry) and not in_flight

    def start_plan(self, plan: Plan) -> list[Any]:
        """Show vLLM only the requests of the plan. Return those that go on waiting."""
        self.victims = [self.requests[preemption.request.id] for preemption in plan.preempt]
        self.running: list[Any] = [entry for entry in self.running if entry not in self.victims]
        admitted = [self.requests[chunk.request.id] for chunk in plan.chunks if chunk.request.status == "waiting"]
        for name, number, most in (
            ("tokens", sum(self.tokens.values()), self.max_num_scheduled_tokens),
            ("running requests", len(self.running) + len(admitted), self.max_num_running_reqs),
        ):
            if number > most:
                raise BadInput(f"vLLM cannot run a plan with {number} {name}: it was started for {most}")
        chosen = set(admitted)
        waiting = [entry for entry in self.waiting if entry not in chosen]
        self.waiting = new_queue(admitted)
        return waiting

    def _reserve_prefill_lookahead(self, entry: Any, computed: int, tokens: int) -> int:
        """Return the tokens that a request computes in this step; vLLM asks before it allocates their blocks."""
        tokens = min(tokens, self.tokens.get(entry.request_id, 0))
        # vLLM allocates further blocks only for tokens that a draft model looks ahead.
        reserved = self.reserved.get(entry.request_id, 0) * self.block_size
        self.num_lookahead_tokens = max(0, reserved - computed - tokens)
        needed = -(-(computed + tokens + self.num_lookahead_tokens) // self.block_size) - len(blocks_of(self, entry))
        free, is_new = self.kv_cache_manager.block_pool.get_num_free_blocks, entry.status.name != "RUNNING"
        while tokens and self.victims and (is_new or needed > free()):
            self.preempt_next()
        return tokens

    def preempt_next(self) -> None:
        """Preempt a request. It must not join the queue from which vLLM admits in this step."""
        waiting, self.waiting = self.waiting, self.preempted
        self._preempt_request(self.victims.pop(0), time.monotonic())
        self.waiting = waiting

    def _make_cached_request_data(self, *args: Any, **kwargs: Any) -> Any:
        while self.victims:  # no request needs their blocks
            self.preempt_next()
        return super()._make_cached_request_data(*args, **kwargs)

    def end_plan(self, plan: Plan, waiting: list[Any], scheduled: dict[str, int]) -> None:
        """Put the queues into the order of the plan, and check that vLLM ran it."""
        new = {chunk.request.id for chunk in plan.chunks if chunk.request.status == "waiting"}
        for id, tokens in self.tokens.items():
            ran = scheduled.get(id, 0)
            if not ran or (ran < tokens and id not in new):  # a new one may find more cached tokens
                raise BadInput(f"vLLM ran {ran} of the {tokens} tokens that the plan has for {id}")
        if self.waiting:
            raise BadInput(f"vLLM had too few blocks for the plan, and preempted {self.waiting[0].request_id}")
        to_back = {preemption.request.id for preemption in plan.preempt if preemption.queue != "front"}
        front = [entry for entry in self.preempted if entry.request_id not in to_back]
        back = [entry for entry in reversed(self.preempted) if entry.request_id in to_back]
        self.waiting, self.preempted = new_queue([*front, *waiting, *back]), new_queue()
        reorder = plan.reorder or Reorder()
        for name, order in (("waiting", reorder.waiting), ("running", reorder.running)):
            if order is not None:
                places = {request.id: place for place, request in enumerate(order)}
                entries = sorted(getattr(self, name), key=lambda entry: places.get(entry.request_id, len(places)))
                setattr(self, name, new_queue(entries) if name == "waiting" else entries)
        for preemption in plan.preempt:
            self.policy_state.forget_promotion(preemption.request)


@cache
def scheduler_class(parts: tuple[type, ...], base: type) -> Any:
    """Return a scheduler class of vLLM with further parts."""
    return type(base.__name__, (*parts, base), {})


class LoggedScheduler:
    """For --scheduler-cls: stock vLLM with a decision log."""

    parts: tuple[type, ...] = (LoggedDecisions,)

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        return scheduler_class(cls.parts, vllm_scheduler(vllm_config))(vllm_config, *args, **kwargs)


class PolicyScheduler(LoggedScheduler):
    """For --scheduler-cls: a servesim policy decides."""

    parts = (LoggedDecisions, PolicyDecisions)

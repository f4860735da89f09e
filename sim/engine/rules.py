"""Rules of an engine beside its scheduler: what it does with prompts, results, finished and preempted requests.

A policy returns the rules of its engine (`Policy.rules`). The defaults here are those of a policy that reproduces no
engine. A family of policies overrides what its engine does differently, in its folder. Attributes are plain facts that
several engines share; a rule of one engine is a method of its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, Optional

from servesim.core import CacheDraft, Chunk, Plan, Policy, Preemption, Request
from servesim.core.native import mypyc_attr

from .cohort import Cohort
from .kv_cache import KvCache
from .state import ServerState
from .step import Step

NO_CACHE: tuple[Optional[KvCache], Optional[CacheDraft]] = (None, None)


@mypyc_attr(allow_interpreted_subclasses=True)
class EngineRules:
    """What an engine does. One object per server; it may keep a state of its own."""

    def __init__(self, engine: str = "", validated_against: str = "not validated", steps_in_flight: int = 1) -> None:
        self.engine = engine  # engine and version that the policy reproduces
        self.validated_against = validated_against  # what its decisions were compared with
        # 2: the next step is decided before the last one has returned (asynchronous scheduling)
        self.steps_in_flight = steps_in_flight
        self.stages = 1  # of pipeline parallelism; each may have a step in flight
        self.foresees_ends = (
            False  # with 2 steps: a request whose last token by a length limit is in flight runs no more
        )
        self.running_order = "admission"  # order of the running queue: admission | arrival | slot
        self.block_size = 16  # tokens per KV block, if the scenario does not say it
        self.reserved_blocks = 0  # blocks of the pool that the engine never gives to a request
        self.rejects_oversized = True  # a request that can never fit is rejected on arrival
        self.rejects_full_prompts = False  # a prompt of max_model_len tokens or more is rejected on arrival
        self.max_prompt: Optional[int] = None  # a longer prompt is rejected on arrival
        self.arrival_is_send_time = False  # the front end stamps a request before the scheduler sees it
        self.aborts_lost = True  # a request whose client has closed the connection; otherwise it is completed
        self.empty_step = 0.0  # seconds of a step that moves requests but runs no model
        self.polls = False  # a step that does nothing takes as long, if a request waits, runs or is swapped
        self.sequence_groups = False  # the answers to a request share blocks; otherwise each is a request of its own
        self.splits_answers = False  # that is what the engine does; otherwise it is not known
        self.has_prefix_cache = False
        self.frees_late = False  # finished requests hold their blocks until a plan releases them
        self.may_have_cache_groups = False  # models whose layers have windows keep the blocks of these apart
        self.may_have_host_cache = False  # host memory for blocks that the prefix cache evicts
        self.drops_tokens_in_flight = False  # a preempted request loses its token in flight and computes it again
        self.slots_field = ""  # field of the policy that limits the running requests
        self.budget_fields: tuple[str, ...] = ()  # fields that limit the tokens or the prompts of a step
        self.loads_first = False  # remote prefill: it starts when the blocks of the decode side are allocated
        self.recomputes_last = False  # of a prompt whose KV was copied, to sample the first token, which does not come
        self.one_token_decodes = False  # `runs_as_decode` can be true for requests with one sequence

    def make_cache(self, state: ServerState, host_blocks: int) -> tuple[Optional[KvCache], Optional[CacheDraft]]:
        """Return the prefix cache, with this number of blocks of host memory, and what a policy sees of it."""
        return NO_CACHE

    def make_cohort(self, block_size: int, has_groups: bool) -> Cohort:
        """Return the object that advances the decoding requests; `has_groups`: of a model with KV cache groups."""
        return Cohort(block_size)

    def slots(self, policy: Policy) -> Optional[int]:
        """Return the most requests that run at a time; None: no setting limits them."""
        slots: Optional[int] = self.setting(policy, self.slots_field)
        return slots

    def setting(self, policy: Policy, field: str) -> Any:
        """Return the value of a field of the policy that limits requests; None: it is not set."""
        return getattr(policy, field, None)

    def token_budget(self, policy: Policy) -> Optional[int]:
        """Return the tokens of a step if the engine admits requests until they, slots or blocks are used up."""
        return None

    def waiting_key(self, policy: Policy) -> Callable[[Request], Any]:
        """Return the sort key of the waiting queue. It does not hold the server: a cycle would keep all requests."""

        def key(request: Request) -> Any:
            return policy.sort_key(request), request.arrival, request.serial

        return key

    def runs_as_decode(self, chunk: Chunk) -> bool:
        """Whether a chunk of one token, the last one of its prompt, runs as a decode row."""
        return False

    def start_plan(self, state: ServerState, plan: Plan) -> None:
        """Do what the engine does before it carries out a plan."""

    def end_plan(self, state: ServerState, plan: Plan) -> None:
        """Do what the engine does after it has carried out a plan, before the model call."""

    def preempt(self, state: ServerState, preemption: Preemption, now: float) -> int:
        """Preempt a request. Return the number of blocks copied to the host."""
        return state.preempt(preemption, now, self.drops_tokens_in_flight)

    def launch_decodes(self, state: ServerState) -> None:
        """Note that a decode of all requests starts."""

    def process_results(self, state: ServerState, step: Step, finished: list[Request], now: float) -> None:
        """Process the results of a step that has returned: finish these requests, in the order of the batch."""
        for request in finished:
            self.finish(state, request, now, step.fails)

    def finish(self, state: ServerState, request: Request, now: float, failed: bool) -> None:
        """Take a request with its last token out of its queue, and free its blocks."""
        state.take_out(request)
        state.mark_finished(request, now, failed)
        state.free_blocks(request, state.unused_tokens(request))

    def before_decision(self, state: ServerState, step: Step) -> None:
        """Do what the engine does between the launch of its newest step and the next decision."""

    def repeat_plan(self, state: ServerState) -> None:
        """Do what a held plan does when it runs once more after a request has finished."""

    def release(self, state: ServerState, request: Request) -> None:
        """Free the blocks of a finished request that a plan releases."""
        state.release(request)

    def exchange(self, state: ServerState, running: Sequence[int]) -> None:
        """Learn how many requests run on each of the ranks in lock step, after a step of all of them."""

    def before_prefills(self, state: ServerState) -> None:
        """Do what a server that only computes prompts does before a decision."""

    def may_load(self, state: ServerState, request: Request, blocks: int, started: int) -> bool:
        """Whether the KV of a request, whose prompt takes this number of blocks, may be copied to this server now.

        `started`: copies that started at this decision. If it may not, the requests behind it wait, too.
        """
        return blocks <= state.pool.free + state.pool.evictable

    def may_join(self, state: ServerState) -> bool:
        """Whether a request whose KV was copied may run now."""
        slots = self.slots(state.policy)
        return slots is None or len(state.running) < slots

    def check_waiting(self, request: Request) -> None:
        """Verify a waiting request between two steps."""
        assert not request.cached, f"{request} waits but has computed tokens"

    def live_refusal(self) -> Optional[str]:
        """Return why a live run cannot do what the engine does; None: it can."""
        return None


def rules_of(policy: Policy) -> EngineRules:
    """Return the rules of the engine that a policy reproduces."""
    rules = policy.rules()
    if rules is None:
        return EngineRules()
    if not isinstance(rules, EngineRules):
        raise TypeError(f"rules: expected EngineRules or None, got {rules!r}")
    return rules

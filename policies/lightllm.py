"""LightLLM: token-granular memory, admission by the estimated peak, new requests let in every so many steps.

Its memory is counted in tokens, which is a pool of blocks of one token; larger blocks work and round up.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.core import FOREVER, Chunk, Eviction, Plan, Policy, Request, Traits, View, at_least

MAX_REQ_TOTAL_LEN = 2048 + 1024  # LightLLM's own longest request, where the scenario names none


class Wait(NamedTuple):
    """What the router remembers."""

    tokens: int = 0  # decodes since requests were last let in
    paused: int = 0  # waiting requests that have run before


@dataclass(frozen=True)
class LightLLM(Policy):
    """Prompts wait for every max_wait_tokens-th decode and enter if the peak of all that run stays below memory."""

    batch_max_tokens: Optional[int] = None  # prompt tokens of a prefill, None for max(memory/6, longest request)
    running_max_req_size: int = 1000  # requests that run or are paused
    max_wait_tokens: int = 10  # decodes between two admissions
    router_token_ratio: float = 0.0  # share of memory in use from which answers are expected at full length
    router_max_new_token_len: int = 1024  # answer expected below that share
    ignore_eos: bool = False  # answers always run to their limit, so expect that
    splitfuse_mode: bool = False  # prompts in parts, in the same steps as decodes
    splitfuse_block_size: int = 256  # tokens of such a part

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "batch_max_tokens", "running_max_req_size")
        at_least(self, 1, "router_max_new_token_len", "splitfuse_block_size")
        at_least(self, 0, "max_wait_tokens", "router_token_ratio")

    @property
    def traits(self) -> Traits:
        return Traits(
            engine="LightLLM 4b037f68 (2024-04-15)",
            validated_against="recordings of LightLLM's RouterManager and ReqQueue, turn by turn",
            rejects_oversized=False,  # the real one drops or blocks by its own rules
            last_token_decodes=True,
        )

    def begin(self) -> Any:
        return Wait()

    def leap(self, memory: Any, iterations: int) -> Any:
        tokens = memory.tokens + iterations
        if iterations and tokens > self.max_wait_tokens:  # it starts again at 1 each time nobody waited
            tokens = (tokens - 1) % self.max_wait_tokens + 1 if self.max_wait_tokens else 1
        return Wait(tokens, memory.paused)

    def decide(self, view: View) -> Plan:
        wait: Wait = view.memory
        tokens = wait.tokens
        if not view.running:
            return self._enter(view, wait) or Plan(memory=wait)
        if tokens >= self.max_wait_tokens:
            tokens = 0
            entering = self._enter(view, wait)
            if entering is not None:
                return entering
        if self._need(view) > view.pool.free:
            victim = max(view.running, key=lambda request: (request.arrival, request.serial))
            return Plan(evict=[Eviction(victim)], memory=Wait(0, wait.paused + 1))
        memory = Wait(tokens + 1, wait.paused)
        if view.prefilling:
            parts = [Chunk(request, min(request.pending, self.splitfuse_block_size)) for request in view.running]
            return Plan(chunks=parts, memory=memory)
        if view.waiting:
            return Plan(decode=True, hold=max(0, self.max_wait_tokens - memory.tokens), memory=memory)
        return Plan(decode=True, hold=FOREVER, lasts=True, memory=memory)

    def _need(self, view: View) -> int:
        """Return the blocks that the next step of all that run takes."""
        need = view.need
        for request in view.prefilling:
            part = min(request.pending, self.splitfuse_block_size)
            need += view.pool.blocks(request.cached + part) - request.blocks
        return need

    def _enter(self, view: View, wait: Wait) -> Optional[Plan]:
        """Let in who may enter; with splitfuse they are only put on the list, and run from the next step on."""
        admit = self._admissions(view, wait.paused) if view.waiting else []
        if not admit:
            return None
        memory = Wait(0, wait.paused - sum(request.evictions > 0 for request in admit))
        if self.splitfuse_mode:
            return Plan(admit=admit, memory=memory)
        return Plan(chunks=[Chunk(request, request.pending) for request in admit], memory=memory)

    def _admissions(self, view: View, paused: int) -> list[Request]:
        admit: list[Request] = []
        if len(view.running) + paused >= self.running_max_req_size:
            return admit
        total = view.pool.total * view.pool.size
        budget, free = self._budget(view, total), view.pool.free
        estimate = Peak(self, view, total)
        for request in view.waiting:
            paused -= request.evictions > 0
            if not estimate.allows(request) or len(estimate) + paused > self.running_max_req_size:
                break
            tokens = min(request.length, self.splitfuse_block_size) if self.splitfuse_mode else request.length
            blocks = view.pool.blocks(tokens)
            if tokens > budget or blocks > free:
                break
            budget -= tokens
            free -= blocks
            admit.append(request)
        return admit

    def _budget(self, view: View, total: int) -> int:
        """Return the prompt tokens that may be added to the next step."""
        budget = self.batch_max_tokens
        if budget is None:
            longest = view.max_model_len or MAX_REQ_TOTAL_LEN
            budget = max(total // 6, self.splitfuse_block_size if self.splitfuse_mode else longest)
        if self.splitfuse_mode:
            budget -= view.decoding
            budget -= sum(min(request.pending, self.splitfuse_block_size) for request in view.prefilling)
        return budget


class Peak:
    """The most tokens that requests will hold at once, if all of them write as much as is expected."""

    def __init__(self, policy: LightLLM, view: View, total: int) -> None:
        self.policy = policy
        self.view = view
        self.total = total
        self.requests: list[Request] = list(view.running)
        # No peak is above the sum of all that everybody may come to: most of the time that settles it.
        self._bound = sum([request.prompt + request.limit for request in self.requests])
        self._bound += sum(self._parts(request) for request in view.prefilling)
        self._full = True  # whether answers are expected at full length
        self._held: Optional[list[tuple[int, int]]] = None  # minus the tokens to come, tokens held once it runs

    def __len__(self) -> int:
        return len(self.requests)

    def allows(self, request: Request) -> bool:
        """Count a request in, and say whether all of them will stay below the memory there is."""
        self.requests.append(request)
        self._bound += request.prompt + request.limit + self._parts(request)
        if self._bound < self.total:
            return True
        if self._held is None:
            used = self.view.cohort.context + sum(request.cached for request in self.view.prefilling)
            self._full = self.policy.ignore_eos or used / self.total >= self.policy.router_token_ratio
            self._held = sorted(map(self._estimate, self.requests))
        else:
            insort(self._held, self._estimate(request))
        return self._peak(self._held) < self.total

    def _parts(self, request: Request) -> int:
        return -(-request.pending // self.policy.splitfuse_block_size) if self.policy.splitfuse_mode else 0

    def _estimate(self, request: Request) -> tuple[int, int]:
        """Return minus the tokens that a request may still add, and those it holds once it runs."""
        written, length = request.written, request.length
        answer = request.limit
        if not self._full:
            answer = min(answer, max(int(1.1 * written), self.policy.router_max_new_token_len))
        if self.policy.splitfuse_mode:
            return -max(0, self._parts(request) + answer - written - 1), length
        if request.place == "running":
            return -max(0, answer - written - 1), length
        return -max(0, answer - written - 2), length + 1  # its prefill will write a token

    def _peak(self, held: list[tuple[int, int]]) -> int:
        """Return the peak: it falls on the end of somebody, while those that go on hold what they wrote until then."""
        peak = total = 0
        for count, (more, tokens) in enumerate(held, 1):
            total += tokens
            peak = max(peak, total - count * more)
        return peak

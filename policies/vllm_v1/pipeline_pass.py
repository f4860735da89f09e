"""The decision of vLLM V1 with pipeline parallelism: a request is in one batch at a time, unless it is a prompt.

Without asynchronous scheduling, a request whose token is in flight has nothing to compute. With it, a request decodes
in every P-th decision at most (P stages), so that its token is there when its batch reaches the first stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from servesim.core import Chunk, Plan, Request, View

from .settings import VLLMSettings
from .speculation import NO_PROMPTS, DraftPass


class PipelinePass(DraftPass):
    """One decision. The state of the policy: the requests that got a token in each of the last P - 1 decisions.

    None: no request did.
    """

    def __init__(self, policy: VLLMSettings, view: View) -> None:
        super().__init__(policy, view, one_by_one=True)
        self.returning = view.engine or NO_PROMPTS  # preempted requests that a step in flight still computes
        self.recent: tuple[frozenset[Request], ...] = view.state or ()

    def running_tokens(self, request: Request) -> int:
        if not self.policy.async_scheduling:
            return 0 if request.in_flight else super().running_tokens(request)
        if any(request in sampled for sampled in self.recent):
            return 0
        return super().running_tokens(request)

    def candidates(self, chunks: Sequence[Chunk]) -> Iterable[Request]:
        waiting, returning = self.view.waiting, self.returning
        return [request for request in waiting if request not in returning] if returning else waiting

    def run(self) -> Plan:
        plan = super().run()
        if self.policy.async_scheduling:
            sampled = frozenset(
                [
                    chunk.request
                    for chunk in plan.chunks
                    if max(chunk.cached, chunk.request.cached) + chunk.tokens >= chunk.request.length
                ]
            )
            recent = (*self.recent, sampled)[1 - self.policy.pipeline_parallel_size :]
            plan.state = recent if any(recent) else None
        return plan

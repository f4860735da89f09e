"""Rules of vLLM v0 beside its scheduler."""

from __future__ import annotations

from servesim.core.native import mypyc_attr
from servesim.engine.rules import EngineRules


@mypyc_attr(allow_interpreted_subclasses=True)
class VLLMv0Rules(EngineRules):
    """Rules of both schedulers of vLLM v0."""

    def __init__(self, engine: str, validated_against: str, sequence_groups: bool) -> None:
        super().__init__(engine, validated_against)
        # The scheduler itself rejects ("ignores") a prompt that can never fit when it is at the head of the queue.
        self.rejects_oversized = False
        self.arrival_is_send_time = True
        self.slots_field, self.budget_fields = "max_num_seqs", ("max_num_batched_tokens",)
        self.sequence_groups = sequence_groups
        self.splits_answers = not sequence_groups

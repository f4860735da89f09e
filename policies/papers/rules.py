"""Rules of the schedulers of papers: each decides itself about requests that can never fit."""

from __future__ import annotations

from servesim.core import Chunk, Request
from servesim.core.native import mypyc_attr
from servesim.engine.rules import EngineRules
from servesim.engine.state import ServerState


@mypyc_attr(allow_interpreted_subclasses=True)
class PaperRules(EngineRules):
    """Rules that these schedulers share."""

    def __init__(self, engine: str, validated_against: str, running_order: str = "admission") -> None:
        super().__init__(engine, validated_against)
        self.slots_field, self.budget_fields = "max_num_seqs", ("chunk_size",)
        self.running_order = running_order
        self.rejects_oversized = False


class LightLLMRules(PaperRules):
    """Rules of LightLLM. With splitfuse_mode, the last token of a prompt runs as a decode if it is alone."""

    def runs_as_decode(self, chunk: Chunk) -> bool:
        return True


class SplitFuseRules(PaperRules):
    """Rules of Dynamic SplitFuse: finished requests hold their blocks until a plan releases them."""

    def __init__(self, engine: str, validated_against: str) -> None:
        super().__init__(engine, validated_against)
        self.slots_field, self.budget_fields = "max_ragged_sequence_count", ("max_ragged_batch_size",)
        self.frees_late = True

    def finish(self, state: ServerState, request: Request, now: float, failed: bool) -> None:
        state.take_out(request)
        state.finished.push(request)
        state.mark_finished(request, now, failed)

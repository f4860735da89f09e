"""What a fit assumes about terms that the samples cannot separate: the FLOPs and bytes of the model.

Each assumption is a weak additional observation. It decides a term only if the samples say almost nothing about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from servesim.costs.model_arithmetic import MODELS, model_of

RELATIVE_ERROR = 3.0  # standard deviation of an assumed value that is not 0, as a multiple of it


@dataclass(frozen=True)
class ModelRatios:
    """Ratios of terms of a transformer. The kernels are assumed to be equally efficient."""

    square_per_token: float  # seconds per squared token of a chunk / seconds per token
    context_per_step: float  # seconds per cached token / seconds of a decode step of one row
    source: str

    @property
    def cross_per_token(self) -> float:
        """Seconds per token of a chunk x token cached before it / seconds per token: no half is masked."""
        return 2 * self.square_per_token


def model_ratios(about: Mapping[str, Any]) -> ModelRatios:
    """Return the ratios of the model in `about`, or of Llama-2-7B if its dimensions are not known."""
    model = model_of(about)
    sizes = MODELS["llama2-7b"] if model is None else model
    # Half the pairs of query and key within a chunk are masked. Weights and cached values have the same size in bytes.
    square = sizes.flops_per_pair / 2 / (2 * sizes.weights)
    return ModelRatios(square, sizes.kv_values / sizes.weights, "Llama-2-7B" if model is None else model.name)

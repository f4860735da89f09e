"""What a fit assumes about terms that the samples cannot separate: the FLOPs and bytes of the model.

Each assumption is a weak additional observation. It decides a term only if the samples say almost nothing about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from servesim.calibrate.device.backend import MODELS

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
    model = about.get("model")
    sizes = model if isinstance(model, Mapping) else vars(MODELS[model]) if model in MODELS else {}
    names = ("layers", "hidden", "intermediate", "vocab")
    known = all(isinstance(sizes.get(name), int) and sizes[name] > 0 for name in names)
    layers, hidden, inner, vocab = (sizes[name] for name in names) if known else (32, 4096, 11008, 32000)
    heads, kv_heads = (sizes.get(name) for name in ("heads", "kv_heads"))
    shared = kv_heads / heads if known and heads and kv_heads else 1.0
    weights = layers * (2 * hidden * hidden * (1 + shared) + 3 * hidden * inner) + vocab * hidden
    # A token needs 2 FLOPs per weight, a pair of query and key 4 per layer and hidden unit; half the pairs are masked.
    square = 2 * layers * hidden / (2 * weights)
    context = 2 * layers * hidden * shared / weights  # both have the same number of bytes per value
    return ModelRatios(square, context, str(sizes.get("name", "the model")) if known else "Llama-2-7B")

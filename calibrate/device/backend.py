"""What a device must be able to do: run rows of tokens over a paged KV cache, move blocks, say what it is.

Standard library only, Python 3.9: a backend runs in a worker process on the device's host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.core import Shape


@dataclass(frozen=True)
class Model:
    """The shape of a Llama."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    context: int  # longest sequence it is built for
    dtype: str = "float32"


MODELS = {
    "llama2-7b": Model("llama2-7b", 32, 4096, 32, 32, 11008, 32000, 4096, "bfloat16"),
    "tiny": Model("tiny", 4, 256, 8, 8, 688, 1000, 2048),
    "micro": Model("micro", 2, 64, 4, 4, 176, 256, 512),
}


class Row(NamedTuple):
    """One request's part of a step: tokens to compute, written behind `position` cached ones into its blocks."""

    tokens: Sequence[int]
    position: int
    table: Sequence[int]  # its device blocks, in order; block i holds tokens [i * block_size, (i + 1) * block_size)


def shape(prompts: Sequence[Row], decodes: Sequence[Row], swapped: int = 0) -> Shape:
    """Return what the time of a step depends on."""
    tokens = sum(len(row.tokens) for row in prompts)
    return Shape(
        prefill_rows=len(prompts),
        prefill_tokens=tokens,
        prefill_live=tokens,
        squares=sum(len(row.tokens) ** 2 for row in prompts),
        cross=sum(len(row.tokens) * row.position for row in prompts),
        decode_rows=len(decodes),
        decode_live=len(decodes),
        context=sum(row.position for row in decodes),
        swapped=swapped,
    )


class OutOfMemory(RuntimeError):
    """The device could not hold a step; the backend stays usable."""


class Backend:
    """A loaded model on a device. One step is one model call, prompts and decodes alike."""

    name = ""

    def load(
        self, model: Model, blocks: int, block_size: int, host_blocks: int = 0, weights: Optional[str] = None
    ) -> None:
        """Build the model and its cache; random weights unless a path is given. The model loaded before goes first."""
        raise NotImplementedError

    def step(self, rows: Sequence[Row]) -> list[int]:
        """Run one step and return each row's most likely next token. The result is on the host when this returns."""
        raise NotImplementedError

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device blocks to host blocks: (device, host) each."""
        self._swap(pairs, True)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy host blocks back to device blocks: (host, device) each."""
        self._swap(pairs, False)

    def _swap(self, pairs: Sequence[tuple[int, int]], out: bool) -> None:
        raise NotImplementedError

    def synchronize(self) -> None:
        """Return when all work given to the device is done."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return device, kernels (fused or reference), dtype, model, versions, blocks: a profile is stamped with it."""
        raise NotImplementedError

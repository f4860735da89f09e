"""The interface of a backend: run rows of tokens on a paged KV cache, copy blocks, describe the device.

A backend runs in a worker process on the device's host: Python 3.9, standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from servesim.core import BadInput, Shape
from servesim.core.errors import DeviceFailed
from servesim.costs.model_arithmetic import MODELS, Model

__all__ = ["MODELS", "Backend", "Model", "OutOfMemory", "Row", "model_named", "shape_of_rows"]


class Row(NamedTuple):
    """The tokens of one request that a step computes.

    A token can be unknown while the step before runs: -1 - j is the token that row j of that step generates.
    """

    tokens: Sequence[int]
    position: int  # cached tokens before these
    table: Sequence[int]  # block table: block i holds tokens [i * block_size, (i + 1) * block_size)
    drafts: int = 0  # of these tokens, the last ones that are guesses (speculative decoding)


def shape_of_rows(prompts: Sequence[Row], decodes: Sequence[Row], swapped: int = 0) -> Shape:
    """Return the shape of a step."""
    lengths = [len(row.tokens) - row.drafts for row in prompts]
    tokens = sum(lengths)
    return Shape(
        prefill_rows=len(prompts),
        prefill_tokens=tokens,
        prefill_live=tokens,
        squares=sum(length**2 for length in lengths),
        cross=sum(length * row.position for length, row in zip(lengths, prompts)),
        decode_rows=len(decodes),
        decode_live=len(decodes),
        context=sum(row.position for row in decodes),
        swapped=swapped,
        longest=max((row.position for row in decodes), default=0),
        drafts=sum(row.drafts for row in (*prompts, *decodes)),
    )


class OutOfMemory(DeviceFailed):
    """A step did not fit into device memory. The backend stays usable."""


ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # usual padded rows of a decode step
STEP_FAILURES = (RuntimeError, MemoryError, ValueError)  # of one step of a probe; OutOfMemory is a RuntimeError


def model_named(name: str) -> Model:
    """Return a model that backends can run."""
    check_choice("--model", name, list(MODELS))
    return MODELS[name]


def check_choice(option: str, value: Any, known: Sequence[str]) -> None:
    """Raise BadInput for an option of a backend with an unknown value."""
    if value not in known:
        raise BadInput(f"{option}: expected one of {', '.join(known)}, got {value!r}")


class Backend:
    """A loaded model on a device. One step runs prompts and decodes in one model call."""

    name = ""
    sampling = ""  # the variant that steps use to select tokens
    samplings: Sequence[str] = ()  # the variants that this device has
    max_steps_in_flight = 1  # launched steps whose tokens have not been collected
    speculation = ""  # verified: rows may have drafts | pretended: also, and all its guesses are right | "": none

    def load(
        self, model: Model, blocks: int, block_size: int, host_blocks: int = 0, weights: Optional[str] = None
    ) -> None:
        """Free the previous model, then build this one and its KV cache. Without a path, the weights are random."""
        raise NotImplementedError

    def step(self, rows: Sequence[Row]) -> list[int]:
        """Run one step and return the most likely next token of each row. The tokens are then on the host.

        A row with drafts has several: the next token after the last one that is known, and after each draft.
        """
        self.launch(rows)
        return self.collect()

    def launch(self, rows: Sequence[Row]) -> None:
        """Start a step. The device runs steps in the order of their launch."""
        raise NotImplementedError

    def collect(self) -> list[int]:
        """Wait for the oldest launched step and return the most likely next token of each of its rows."""
        raise NotImplementedError

    def compute(self, rows: Sequence[Row]) -> None:
        """Run the model calls of a step; the logits stay on the device."""
        raise NotImplementedError

    def select_tokens(self, sampling: str) -> list[int]:
        """Select the tokens of the computed rows in one of the variants; a probe measures its time."""
        raise NotImplementedError

    def logits(self, rows: Optional[Sequence[int]] = None) -> Any:
        """Copy the logits of the last step, or of some of its rows, to the host as [rows, vocab].

        None: it has no logits, or a later step that is in flight may have replaced them.
        """
        return None

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy device blocks to host blocks; a pair is (device block, host block)."""
        self._swap(pairs, to_host=True)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy host blocks to device blocks; a pair is (host block, device block)."""
        self._swap(pairs, to_host=False)

    def _swap(self, pairs: Sequence[tuple[int, int]], to_host: bool) -> None:
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until the device has finished all its work."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return device, kernels (fused or reference), dtype, model, versions and blocks; profiles keep them."""
        raise NotImplementedError

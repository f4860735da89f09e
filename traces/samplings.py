"""Columns of traces for several answers to a request: parallel sampling and beam search.

A column that is not a number is a list in JSON, in files with comma-separated values as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Optional

from servesim.core import Sampling
from servesim.core.sampling import MAX_SEQUENCES

SAMPLING_COLUMNS = ("n", "best_of", "beam_width", "sequence_tokens", "beam_parents")


def make_sampling(output: int, values: Sequence[Any]) -> Optional[Sampling]:
    """Return the sampling of a row from its values in the order of SAMPLING_COLUMNS; None: one answer.

    Raise ValueError with the column and what was expected.
    """
    n, best_of, beam_width, sequence_tokens, beam_parents = values
    n = 1 if n is None else n
    sequences = best_of or beam_width or n
    if not 1 <= n <= MAX_SEQUENCES:
        raise ValueError(f"n: expected 1 to {MAX_SEQUENCES}")
    if not n <= sequences <= MAX_SEQUENCES:
        raise ValueError(f"{'beam_width' if best_of is None else 'best_of'}: expected n ({n}) to {MAX_SEQUENCES}")
    if beam_width is not None and not 1 < beam_width == sequences:
        raise ValueError("beam_width: expected at least 2, and the same as best_of")
    if sequence_tokens is not None and not is_tokens(sequence_tokens, sequences, output):
        raise ValueError(
            f"sequence_tokens: expected the tokens of {sequences} sequences, the longest with {output} (output_tokens)"
        )
    if beam_parents is not None and (beam_width is None or not is_beams(beam_parents, sequences)):
        raise ValueError(
            "beam_parents: expected, for each token of a beam search, the positions of the parents of the beams"
        )
    if sequences == 1:
        return None
    return Sampling(n, sequences, beam_width is not None, tuple(sequence_tokens or ()), beam_parents)


def is_tokens(value: Any, count: int, longest: int) -> bool:
    """Whether a value has the tokens of a number of sequences."""
    return (
        isinstance(value, (list, tuple))
        and len(value) == count
        and all(type(tokens) is int and tokens > 0 for tokens in value)
        and max(value) == longest
    )


def is_beams(value: Any, width: int) -> bool:
    """Whether a value has the parents of the live beams after each token."""
    if not isinstance(value, (list, tuple)):
        return False
    live = 1
    for parents in value:
        if not isinstance(parents, (list, tuple)) or not live or len(parents) > width:
            return False
        if not all(type(parent) is int and 0 <= parent < live for parent in parents):
            return False
        live = len(parents)
    return True


def sampling_columns(
    samplings: Sequence[Optional[Sampling]], write_list: Callable[[Any], Any] = json.dumps
) -> dict[str, list[Any]]:
    """Return the columns of a file, without empty ones."""
    rows = [(None,) * len(SAMPLING_COLUMNS) if sampling is None else values_of(sampling) for sampling in samplings]
    columns = {name: [row[k] for row in rows] for k, name in enumerate(SAMPLING_COLUMNS)}
    for name in SAMPLING_COLUMNS[3:]:
        columns[name] = [None if value is None else write_list(value) for value in columns[name]]
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def values_of(sampling: Sampling) -> tuple[Any, ...]:
    """Return the values of a sampling in the order of SAMPLING_COLUMNS."""
    width = sampling.best_of if sampling.beam_search else None
    best_of = None if sampling.beam_search else sampling.best_of
    return sampling.n, best_of, width, list(sampling.outputs) or None, sampling.parents


def scaled_sampling(sampling: Sampling, scale: Callable[[int], int]) -> Sampling:
    """Return the sampling of a request whose output length was changed; recorded beams have the old length."""
    outputs = tuple(map(scale, sampling.outputs))
    return Sampling(sampling.n, sampling.best_of, sampling.beam_search, outputs)

"""The parts of a step as linear models: their terms, and what is assumed about them.

A fit assumes the FLOPs and bytes of the model for terms that the samples cannot separate. Each assumption is a weak
additional observation. It decides a term only if the samples say almost nothing about it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import numpy as np
from servesim.costs.model_arithmetic import MODELS, model_of
from servesim.costs.parts import DecodePart, MixedPart, PartsCost, PrefillPart, SwapPart, interpolate

from .curves import continued, knots_for, rising_basis, round_up_to_bucket, smoothness_rows, typical_slope
from .sample_set import Array, Groups
from .solver import Problem

RELATIVE_ERROR = 3.0  # standard deviation of an assumed value that is not 0, as a multiple of it
LARGEST_SHARE = 0.5  # standard deviation of a term assumed to be 0: what it adds to the longest step, as a fraction
SMALL_SHARE = 0.1  # of that: smallest standard deviation of a term assumed from the sizes of the model
SMALLEST = 1e-3  # of the shortest step: a curve starts at this time at least
PREFILL_TERMS = ("row", "square", "cross", "cross_root", "paged_square")
MIXED_TERMS = ("mixed.step", "mixed.row", "mixed.context")


@dataclass(frozen=True)
class ModelRatios:
    """Ratios of terms of a transformer. The kernels are assumed to be equally efficient."""

    square_per_token: float  # seconds per squared token of a chunk / seconds per token
    context_per_step: float  # seconds per cached token / seconds of a decode step of one row
    source: str


def model_ratios(about: Mapping[str, Any]) -> ModelRatios:
    """Return the ratios of the model in `about`, or of Llama-2-7B if its dimensions are not known."""
    model = model_of(about)
    sizes = MODELS["llama2-7b"] if model is None else model
    # Half the pairs of query and key within a chunk are masked. Weights and cached values have the same size in bytes.
    square = sizes.flops_per_pair / 2 / (2 * sizes.weights)
    return ModelRatios(square, sizes.kv_values / sizes.weights, "Llama-2-7B" if model is None else model.name)


def tokens_read(context: Array, step: int) -> Array:
    """Return the cached tokens that steps read, as `DecodePart.tokens_read`."""
    return np.asarray(np.ceil(context / step) * step if step else context, float)


def longest_contexts(groups: Groups) -> Array:
    """Return the longest contexts of steps; if they are not known, all rows are equally long, as in `DecodePart`."""
    longest, rows = groups.column("longest"), np.maximum(groups.column("decode_live"), 1)
    return np.asarray(np.where(longest > 0, longest, groups.column("context") / rows), float)


class LinearModel:
    """A part as a curve and further terms. The values of a solution are those of the curve, then the terms.

    The curve has its first value and its increments.
    """

    part = ""  # its name in a profile
    knots: Sequence[float] = ()
    terms: Sequence[str] = ()
    smallest = 0.0  # seconds of the first point of the curve, at least
    certain: Sequence[str] = ()  # terms without an assumption: the samples always determine them
    curve_name = ""  # of the curve in a profile
    ends_at_last_knot = False  # no point is added above the measured range

    @property
    def names(self) -> list[str]:
        return [*(f"knot {x:g}" for x in self.knots), *self.terms]

    def design(self, groups: Groups) -> Array:
        """Return one column per value."""
        raise NotImplementedError

    def curve_values(self, groups: Groups) -> Array:
        """Return where on the curve each step is."""
        return np.zeros(len(groups))

    def known(self, values: Array) -> Mapping[str, float]:
        """Return the assumed values of terms that are not 0."""
        return {}

    def apply(self, cost: PartsCost, values: Array) -> PartsCost:
        """Return a cost model with these values of the part."""
        raise NotImplementedError

    def problem(self, groups: Groups) -> Problem:
        """Return the least-squares problem of these samples."""
        design, curve = self.design(groups), len(self.knots)
        largest = LARGEST_SHARE * float(groups.seconds.max()) / np.maximum(np.abs(design).max(axis=0), 1.0)
        smoothness = np.zeros((max(0, curve - 2), design.shape[1]))
        smoothness[:, :curve] = smoothness_rows(self.knots, self.curve_values(groups), groups.seconds)
        free = np.array([True] * curve + [term in self.certain for term in self.terms])

        def assumed(values: Array) -> tuple[Array, Array]:
            known = self.known(values)
            expected = np.array([0.0] * curve + [known.get(term, 0.0) for term in self.terms])
            deviation = np.where(expected > 0, np.maximum(RELATIVE_ERROR * expected, SMALL_SHARE * largest), largest)
            deviation[free] = np.inf
            return expected, deviation

        return Problem(groups, self.names, design, assumed, smoothness, np.zeros(len(groups)))

    def curve(self, values: Array) -> list[tuple[float, float]]:
        """Return the points of the curve. It is never 0, so every step takes some time."""
        increments = values[: len(self.knots)].copy()
        increments[0] = max(increments[0], self.smallest)
        points = [(float(x), float(y)) for x, y in zip(self.knots, np.cumsum(increments), strict=True)]
        return points if len(points) == 1 or self.ends_at_last_knot else continued(points)

    def of_term(self, values: Array, term: str) -> float:
        """Return the value of a term, 0 if the model does not have it."""
        return float(values[len(self.knots) + self.terms.index(term)]) if term in self.terms else 0.0


class DecodeModel(LinearModel):
    """A rising curve over rows, and terms per live row, per cached token and per draft."""

    part = "decode"
    curve_name = "rows"

    def __init__(
        self, groups: Groups, buckets: Sequence[int], ratios: ModelRatios, further: str = "", context_step: int = 0
    ) -> None:
        """`further`: one more term of the context, `longest` or `context_root`."""
        self.buckets, self.ratios, self.context_step = buckets, ratios, context_step
        self.ends_at_last_knot = bool(buckets)  # every point of a padded curve is a bucket
        rows = self.curve_values(groups)
        self.knots = knots_for(rows, buckets)
        self.smallest = SMALLEST * float(groups.seconds.min())
        # A log without contexts has their time in the curve over rows: an assumed time would count it twice.
        self.has_context = bool(groups.column("context").any())
        # Without padding, the curve over rows has the time of live rows.
        padded = np.any(groups.column("decode_live") != rows)
        optional = {"live": padded, "draft": groups.column("drafts").any()}
        self.terms = ("context", *(term for term in optional if optional[term]), *([further] if further else []))

    def curve_values(self, groups: Groups) -> Array:
        return round_up_to_bucket(groups.column("decode_rows"), self.buckets)

    def design(self, groups: Groups) -> Array:
        context = tokens_read(groups.column("context"), self.context_step)
        columns = {
            "context": context, "context_root": np.sqrt(context), "live": groups.column("decode_live"),
            "longest": longest_contexts(groups), "draft": groups.column("drafts"),
        }  # fmt: skip
        return np.column_stack(
            [rising_basis(self.curve_values(groups), self.knots), *(columns[term] for term in self.terms)]
        )

    def known(self, values: Array) -> Mapping[str, float]:
        return {"context": self.ratios.context_per_step * float(values[0])} if self.has_context else {}

    def apply(self, cost: PartsCost, values: Array) -> PartsCost:
        """Every bucket is a point of the curve, also one that was not measured."""
        curve = self.curve(values)
        missing = {float(bucket) for bucket in self.buckets} - set(self.knots)
        points = sorted([*curve, *((x, interpolate(curve, x)) for x in missing)])
        live, context, root = (self.of_term(values, term) for term in ("live", "context", "context_root"))
        found: Any = {name: self.of_term(values, name) for name in ("longest", "draft") if name in self.terms}
        decodes = DecodePart(tuple(points), live, context, root, tuple(self.buckets), self.context_step, **found)
        return replace(cost, decodes=decodes)


class PrefillModel(LinearModel):
    """Prefill and mixed steps: a rising curve over tokens, terms per row and of the attention, terms of the decodes.

    `one_pass`: decodes join the prompt tokens. Otherwise a mixed step is prefill + decode - overlap * the shorter one.
    """

    part = "prefill"
    curve_name = "tokens"
    overlap = 0.0
    floor = True  # as in MixedPart
    width = 0  # as in PrefillPart
    width_power: Optional[float] = None

    def __init__(
        self, groups: Groups, buckets: Sequence[int], ratios: ModelRatios, decodes: DecodePart, one_pass: bool = True
    ) -> None:
        self.buckets, self.ratios, self.decodes, self.one_pass = buckets, ratios, decodes, one_pass
        self.knots = knots_for(self.curve_values(groups), buckets)
        self.smallest = SMALLEST * float(groups.seconds.min())
        self.terms = (*PREFILL_TERMS, *MIXED_TERMS) if one_pass else PREFILL_TERMS

    def curve_values(self, groups: Groups) -> Array:
        joined = groups.column("decode_rows") + groups.column("drafts") if self.one_pass else 0.0
        return round_up_to_bucket(groups.column("prefill_tokens") + joined, self.buckets)

    def design(self, groups: Groups) -> Array:
        cross, decoding = groups.column("cross"), groups.column("decode_rows")
        power = 1.0 if self.width_power is None else self.width_power
        columns = {
            "row": groups.column("prefill_rows"),
            "square": groups.column("squares"),
            "cross": cross * np.maximum(1.0, self.width / np.maximum(groups.column("prefill_tokens"), 1)) ** power,
            "cross_root": np.sqrt(cross),
            "paged_square": np.where(cross > 0, groups.column("squares"), 0.0),
            "mixed.step": (decoding > groups.column("drafts")).astype(float),  # as in PartsCost
            "mixed.row": decoding,
            "mixed.context": tokens_read(groups.column("context"), self.decodes.context_step),
        }
        return np.column_stack(
            [rising_basis(self.curve_values(groups), self.knots), *(columns[term] for term in self.terms)]
        )

    def problem(self, groups: Groups) -> Problem:
        """The longest context of the decodes takes as long as without prompts."""
        known = self.decodes.longest * longest_contexts(groups) if self.decodes.longest and self.one_pass else 0.0
        problem = super().problem(groups)
        return replace(problem, offset=problem.offset + known)

    def curve(self, values: Array) -> list[tuple[float, float]]:
        """Return the points. If all steps have the same tokens, half of their time is assumed to grow with tokens."""
        points = super().curve(values)
        if len(points) == 1:
            ((tokens, seconds),) = points
            points.append((2 * tokens, 1.5 * seconds))
        return points

    def known(self, values: Array) -> Mapping[str, float]:
        curve, top = self.curve(values), self.knots[-1]
        token = (interpolate(curve, top) - interpolate(curve, top / 2)) / (top / 2)  # seconds of one in large steps
        # Decodes join the prompts in one model call. A decode can need more than a prompt token: its output is sampled.
        row = typical_slope([(point[0], point[1]) for point in self.decodes.rows]) + self.decodes.live - token
        return {
            "square": self.ratios.square_per_token * token,
            "cross": 2 * self.ratios.square_per_token * token,  # no half of the pairs is masked
            "mixed.row": max(0.0, row),
            "mixed.context": self.decodes.context,
        }

    def apply(self, cost: PartsCost, values: Array) -> PartsCost:
        curve = tuple(self.curve(values))
        terms: dict[str, Any] = {term: self.of_term(values, term) for term in PREFILL_TERMS}
        step, per_row, context = (self.of_term(values, term) for term in MIXED_TERMS)
        terms |= {"width": self.width, "width_power": self.width_power}
        prefill = PrefillPart(curve, **terms, buckets=tuple(self.buckets))
        mixed = MixedPart(self.one_pass, step, per_row, context, self.overlap, self.floor)
        return replace(cost, prefill=prefill, mixed=mixed)


class SwapModel(LinearModel):
    """A fixed time and a time per block."""

    part = "swap"
    terms = ("step", "block")
    certain = ("block",)

    def design(self, groups: Groups) -> Array:
        blocks = groups.column("swapped")
        return np.column_stack([np.ones(len(blocks)), blocks])

    def apply(self, cost: PartsCost, values: Array) -> PartsCost:
        return replace(cost, swap=SwapPart(*values.tolist()))

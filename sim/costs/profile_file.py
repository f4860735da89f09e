"""The keys of profile.yaml that are used. Numbers may be null: a fit writes null for a value that is not finite."""

from __future__ import annotations

from typing import Annotated, Any, Optional, Union

from pydantic import Field
from servesim.files.checked import (
    AnyAtLeast0,
    AnyPositive,
    AtLeast0,
    Keys,
    Limits,
    Seconds,
    Stored,
    StoredNumber,
    Whole,
    expects,
)

MAX_NOISE = 1e6  # measured time / predicted time
MAX_PEAK = 1e21  # FLOPs or bytes per second
Watts = Annotated[AnyAtLeast0, Limits(0, 1e6)]
Factors = Annotated[list[Annotated[AnyAtLeast0, Limits(0, MAX_NOISE)]], expects("a list of factors of at least 0")]


class ColdStart(Stored):
    """Extra seconds of the first model calls."""

    prefill: Optional[Seconds] = None
    decode: Optional[Seconds] = None


class FrontEnd(Stored):
    """The delay of a measured server."""

    seconds: Optional[Seconds] = None
    per_request: Optional[Seconds] = None  # one after the other
    per_token: Optional[Seconds] = None  # of the prompt, in addition


class Launch(Stored):
    """A server without CUDA graphs."""

    seconds: Seconds  # to launch the kernels of a step: it takes at least as long


class FirstUse(Stored):
    """Extra seconds of the first step with a new padded number of tokens."""

    tokens: Whole
    seconds: Seconds


class SamplingTerms(Stored):
    """Seconds to select the tokens of a step in one way."""

    step: Seconds
    row: Seconds


class SamplingKeys(Stored):
    """How the measured steps selected their tokens, and the seconds of every way that was measured."""

    used: str
    device: Optional[str] = None  # where the seconds were measured, if not with the steps
    terms: dict[str, SamplingTerms] = Field({})


class ErrorKeys(Stored):
    """The held-out error of one kind of step."""

    mean: Optional[StoredNumber] = None
    max: Optional[StoredNumber] = None  # of whole runs


class LoadKeys(Stored):
    """The loads of an endpoint calibration."""

    missed: Optional[dict[str, AtLeast0]] = None  # sizes that no measured step shows


class Parameter(Stored):
    """A fitted parameter and its interval."""

    value: Optional[StoredNumber] = None
    low: Optional[StoredNumber] = None
    high: Optional[StoredNumber] = None


class PredictedRun(Stored):
    """A run that checks a fit to logs."""

    run: Union[str, int]
    error: Optional[StoredNumber] = None


class Fit(Stored):
    """How the parameters were fitted."""

    parameters: Optional[dict[str, Parameter]] = None
    fitted: Optional[list[PredictedRun]] = None
    left_out: Optional[list[PredictedRun]] = None
    predicted: Optional[list[PredictedRun]] = None


class CostKeys(Stored):
    """The cost model; mapping.py validates its terms."""

    kind: str = "linear"
    tables: str = "tables.npz"  # of Vidur


class UncertaintyKeys(Stored):
    """The joint uncertainty of the parameters."""

    session: Optional[Annotated[AnyAtLeast0, Limits(0, 1)]] = None
    ttft: Optional[Annotated[AnyAtLeast0, Limits(0, 1)]] = None
    draws: Optional[list[list[StoredNumber]]] = None


class RangeError(Stored):
    """The held-out error in a range of sizes."""

    mean: StoredNumber
    bias: StoredNumber
    points: Whole


class PeakKeys(Stored):
    """What the device can do at best, from its data sheet."""

    flops: Annotated[AnyPositive, Limits(1, MAX_PEAK)]  # per second
    bandwidth: Annotated[AnyPositive, Limits(1, MAX_PEAK)]  # bytes per second
    source: Optional[str] = None


class PowerKeys(Stored):
    """Watts of the device: without steps, and while steps of a kind run without a break."""

    idle: Watts
    prefill: Watts
    decode: Watts
    mixed: Optional[Watts] = None
    source: Optional[str] = None


class InFlightKeys(Stored):
    """By how many seconds a step in flight is shorter than one alone."""

    step: AtLeast0  # every step: its input, its start and its tokens
    launch: AtLeast0  # in addition, one that is larger than all padding buckets: its kernels are launched one by one


class DraftingKeys(Stored):
    """Seconds of one pass of a drafter (speculative decoding)."""

    method: Optional[str] = None  # that was measured; None: any
    step: Seconds
    row: Optional[Seconds] = None
    token: Optional[Seconds] = None  # of a prompt, or a draft that is verified: the first pass computes them too


class ModelKeys(Keys):
    """The dimensions of a model that has no known name. An unknown one would be missing in its memory."""

    name: Optional[str] = None
    layers: Whole
    hidden: Whole
    heads: Whole
    kv_heads: Whole
    intermediate: Whole
    vocab: Whole
    head: Optional[Whole] = None
    experts: Optional[Whole] = None
    experts_per_token: Optional[Whole] = None
    shared: Optional[Whole] = None
    window: Optional[Whole] = None
    full_layers: Optional[Whole] = None
    full_first: Optional[Whole] = None
    context: Optional[Whole] = None
    dtype: Optional[str] = None


class DerivedKeys(Stored):
    """The measured profile from which another one was derived by arithmetic."""

    profile: str
    digest: str
    changed: list[str]  # model, precision, tensor parallelism, device


class CheckKeys(Stored):
    """A load on the server that was no part of the fit."""

    noise: Optional[StoredNumber] = None  # of the machine, as a fraction
    errors: dict[str, StoredNumber] = Field({})  # by metric, as fractions


class ServerKeys(Stored):
    """The server whose steps were recorded."""

    command: list[str]  # model and flags; empty if another program has started it
    policy: dict[str, Any]  # its settings, as sections of a scenario
    engine: dict[str, Any]
    speculative: Optional[dict[str, Any]] = None


class ProfileFile(Stored):
    """The keys of profile.yaml that are used; the others are only printed."""

    cost: CostKeys
    name: Optional[Union[str, int, float]] = None
    cold_start: Optional[ColdStart] = None
    cold: Optional[ColdStart] = None
    front_end: Optional[FrontEnd] = None
    first_use: Optional[FirstUse] = None
    launch: Optional[Launch] = None
    in_flight: Optional[InFlightKeys] = None
    drafting: Optional[DraftingKeys] = None
    sampling: Optional[SamplingKeys] = None
    error: Optional[dict[str, Optional[ErrorKeys]]] = None
    check: Optional[CheckKeys] = None
    server: Optional[ServerKeys] = None
    loads: Optional[LoadKeys] = None
    noise: Optional[dict[str, Factors]] = None
    grid: Optional[dict[str, Annotated[list[AtLeast0], Field(min_length=2, max_length=2)]]] = None
    row_buckets: Optional[list[Whole]] = None
    context_step: Optional[Whole] = None  # the engine reads cached tokens in multiples of this
    rows_with_context: Optional[StoredNumber] = None  # their correlation in a step log, if it is high
    token_buckets: Optional[list[Whole]] = None
    fit: Optional[Fit] = None
    uncertainty: Optional[UncertaintyKeys] = None
    error_by_range: Optional[dict[str, dict[str, RangeError]]] = None
    tied: Optional[dict[str, str]] = None
    peak: Optional[PeakKeys] = None
    power: Optional[PowerKeys] = None
    model: Optional[Union[str, int, float, dict[str, Any]]] = None
    derived: Optional[DerivedKeys] = None
    tensor_parallel: Optional[Whole] = None
    pipeline_parallel: Optional[Whole] = None
    kv_dtype: Optional[str] = None  # of the KV cache, if it is not that of the weights
    device_memory: Optional[Annotated[AnyPositive, Limits(1, 1e18)]] = None  # bytes
    total_error: Optional[dict[str, Optional[StoredNumber]]] = None

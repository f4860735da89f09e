"""The keys of profile.yaml that are used, and their types. The others are only printed.

Numbers may be null: a fit writes null for a value that is not finite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Optional, Union

from pydantic import Field, create_model
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

from .model_arithmetic import MORE_SIZES, SIZES

MAX_NOISE = 1e6  # measured time / predicted time
MAX_PEAK = 1e21  # FLOPs or bytes per second
Watts = Annotated[AnyAtLeast0, Limits(0, 1e6)]
Factors = Annotated[list[Annotated[AnyAtLeast0, Limits(0, MAX_NOISE)]], expects("a list of factors of at least 0")]
Spread = Annotated[AnyAtLeast0, Limits(0, 1)]
Rate = Annotated[AnyPositive, Limits(1, MAX_PEAK)]
by_name: Any = dict  # of types that are values: mypy accepts no such dict[...]
several: Any = list


class SamplingTerms(Stored):
    """Seconds to select the tokens of a step in one way."""

    step: Seconds
    row: Seconds


class SamplingKeys(Stored):
    """How the measured steps selected their tokens, and the seconds of every way that was measured."""

    used: str
    device: Optional[str] = None  # where the seconds were measured, if not with the steps
    terms: dict[str, SamplingTerms] = Field({})


def keys(required: Optional[Mapping[str, Any]] = None, **optional: Any) -> Any:
    """Return a model with the types of keys. An optional one may be null; (type, default): it may be missing only."""
    fields: dict[str, Any] = {key: (kind, ...) for key, kind in (required or {}).items()}
    fields |= {key: kind if type(kind) is tuple else (Optional[kind], None) for key, kind in optional.items()}
    return create_model("Section", __base__=Stored, **fields)


EXTRA = keys(prefill=Seconds, decode=Seconds)  # seconds of the first model calls
RUNS = several[keys({"run": Union[str, int]}, error=StoredNumber)]  # that check a fit to logs
PARAMETER = keys(value=StoredNumber, low=StoredNumber, high=StoredNumber)
RANGE = keys({"mean": StoredNumber, "bias": StoredNumber, "points": Whole})  # held-out error in a range of sizes
SECTIONS: dict[str, Any] = {
    "name": Union[str, int, float],
    "cold_start": EXTRA,
    "cold": EXTRA,
    # the delay of a measured server: it takes `per_request` one after the other, and `per_token` of the prompt
    "front_end": keys(seconds=Seconds, per_request=Seconds, per_token=Seconds),
    "first_use": keys({"tokens": Whole, "seconds": Seconds}),  # of the first step with a new padded number of tokens
    "launch": keys({"seconds": Seconds}),  # of the kernels of a step, without CUDA graphs: it takes at least as long
    # by how much a step in flight is shorter than one alone; `launch`: one above all padding buckets, in addition
    "in_flight": keys({"step": AtLeast0, "launch": AtLeast0}),
    # one pass of a drafter: the first one also computes the tokens of prompts and drafts; no method: any
    "drafting": keys({"step": Seconds}, method=str, row=Seconds, token=Seconds),
    "sampling": SamplingKeys,
    "error": by_name[str, Optional[keys(mean=StoredNumber, max=StoredNumber)]],  # held-out
    # a load on the server that was no part of the fit: the noise of the machine, errors by metric, as fractions
    "check": keys(noise=StoredNumber, errors=(dict[str, StoredNumber], {})),
    # whose steps were recorded: model and flags (empty if another program has started it), sections of a scenario
    "server": keys(
        {"command": list[str], "policy": dict[str, Any], "engine": dict[str, Any]}, speculative=dict[str, Any]
    ),
    "loads": keys(missed=dict[str, AtLeast0]),  # sizes of an endpoint calibration that no measured step shows
    "noise": dict[str, Factors],
    "grid": dict[str, Annotated[list[AtLeast0], Field(min_length=2, max_length=2)]],
    "row_buckets": list[Whole],
    "context_step": Whole,  # the engine reads cached tokens in multiples of this
    "rows_with_context": StoredNumber,  # their correlation in a step log, if it is high
    "token_buckets": list[Whole],
    "fit": keys(parameters=by_name[str, PARAMETER], fitted=RUNS, left_out=RUNS, predicted=RUNS),
    "uncertainty": keys(session=Spread, ttft=Spread, draws=list[list[StoredNumber]]),
    "error_by_range": by_name[str, by_name[str, RANGE]],
    "tied": dict[str, str],
    "peak": keys({"flops": Rate, "bandwidth": Rate}, source=str),  # from the data sheet of the device
    # watts of the device: without steps, and while steps of a kind run without a break
    "power": keys({"idle": Watts, "prefill": Watts, "decode": Watts}, mixed=Watts, source=str),
    "model": Union[str, int, float, dict[str, Any]],
    "derived": keys({"profile": str, "digest": str, "changed": list[str]}),  # by arithmetic, from a measured profile
    "tensor_parallel": Whole,
    "pipeline_parallel": Whole,
    "kv_dtype": str,  # of the KV cache, if it is not that of the weights
    "device_memory": Annotated[AnyPositive, Limits(1, 1e18)],  # bytes
    "total_error": dict[str, Optional[StoredNumber]],
}
ProfileFile = keys(
    {"cost": keys(kind=(str, "linear"), tables=(str, "tables.npz"))},  # mapping.py validates its terms
    **SECTIONS,
)
SIZE_FIELDS: dict[str, Any] = {
    "name": (Optional[str], None),
    **dict.fromkeys(SIZES, (Whole, ...)),
    **dict.fromkeys((*MORE_SIZES, "context"), (Optional[Whole], None)),
    "dtype": (Optional[str], None),
}
# The dimensions of a model that has no known name. An unknown one would be missing in its memory.
ModelKeys = create_model("ModelKeys", __base__=Keys, **SIZE_FIELDS)

"""The keys of profile.yaml that are used. Numbers may be null: a fit writes null for a value that is not finite."""

from __future__ import annotations

from typing import Annotated, Optional, Union

from pydantic import Field
from servesim.files.checked import AnyAtLeast0, AtLeast0, Limits, Seconds, Whole, expects
from servesim.files.stored import Stored, StoredNumber

MAX_NOISE = 1e6  # measured time / predicted time
Factors = Annotated[list[Annotated[AnyAtLeast0, Limits(0, MAX_NOISE)]], expects("a list of factors of at least 0")]


class ColdStart(Stored):
    """Extra seconds of the first model calls."""

    prefill: Optional[Seconds] = None
    decode: Optional[Seconds] = None


class FrontEnd(Stored):
    """The delay of a black-box server."""

    seconds: Optional[Seconds] = None


class ErrorKeys(Stored):
    """The held-out error of one kind of step."""

    mean: Optional[StoredNumber] = None


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
    left_out: Optional[list[PredictedRun]] = None
    predicted: Optional[list[PredictedRun]] = None


class CostKeys(Stored):
    """The cost model; mapping.py validates its terms."""

    kind: str = "linear"
    tables: str = "tables.npz"  # of Vidur


class ProfileFile(Stored):
    """The keys of profile.yaml that are used; the others are only printed."""

    cost: CostKeys
    name: Optional[Union[str, int, float]] = None
    cold_start: Optional[ColdStart] = None
    front_end: Optional[FrontEnd] = None
    error: Optional[dict[str, Optional[Union[StoredNumber, ErrorKeys]]]] = None
    noise: Optional[dict[str, Factors]] = None
    grid: Optional[dict[str, Annotated[list[AtLeast0], Field(min_length=2, max_length=2)]]] = None
    gears: Optional[list[Whole]] = None
    token_gears: Optional[list[Whole]] = None
    busy: Optional[StoredNumber] = None
    fit: Optional[Fit] = None

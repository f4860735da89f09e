"""Validate sections of a file with pydantic: types of values, sizes in bytes, and one-line errors that name the key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Optional, TypeVar, Union, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function, with_info_plain_validator_function
from servesim.core import BadInput
from servesim.core.limits import (
    MAX_INT,
    MAX_NUMBER,
    MAX_RATE,
    MAX_RESULT,
    MAX_SECONDS,
    MAX_TOKENS,
    MIN_NUMBER,
    MIN_RATE,
)

from .read import did_you_mean, quote, shorten

T = TypeVar("T")


class Missing:
    """Represents the value of a missing key; messages print it as `nothing`."""

    def __repr__(self) -> str:
        return "nothing"


def expected_error(text: str) -> PydanticCustomError:
    """Return an error that reads `KEY: expected TEXT, got VALUE`."""
    return PydanticCustomError("expected", text)


def invalid_error(text: str) -> PydanticCustomError:
    """Return an error that reads `KEY: TEXT`."""
    return PydanticCustomError("wrong", text)


def error_at(key: str, error: PydanticCustomError, value: Any) -> ValidationError:
    """Return an error that names a key of the section that is validated."""
    return ValidationError.from_exception_data("", [{"type": error, "loc": (key,), "input": value}])


def expects(text: str) -> WrapValidator:
    """Return a validator that replaces pydantic's message by `expected TEXT`."""

    def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(value)
        except ValidationError as error:
            if error.errors()[0]["loc"]:
                raise  # an inner value is wrong and has its own message
            raise expected_error(text) from None

    return WrapValidator(check)


def to_int(value: Any) -> Any:
    """Return a float like 1e4 as an int; other values unchanged."""
    return int(value) if type(value) is float and value.is_integer() else value


def to_whole(value: Any) -> Any:
    """Return a float like 1e4 as an int; raise an error for other floats and for true and false."""
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise expected_error("a whole number")
    return to_int(value)


def reject_bool(value: Any) -> Any:
    """Raise an error for true and false, which pydantic reads as 1 and 0."""
    if isinstance(value, bool):
        raise expected_error("a number")
    return value


@dataclass(frozen=True)
class Limits:
    """The smallest and the largest number that a key accepts; the JSON schema shows them."""

    minimum: float
    maximum: float

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "minimum": self.minimum, "maximum": self.maximum}

    def _check(self, value: float) -> float:
        if not self.minimum <= value <= self.maximum:
            raise expected_error(f"a number from {self.minimum:g} to {self.maximum:g}")
        return value


@dataclass(frozen=True)
class WholeUpTo:
    """Whole numbers from 1 to the largest one that a key accepts; 1e4 is one."""

    maximum: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        limits, text = Field(strict=True, ge=1, le=self.maximum), f"a whole number from 1 to {self.maximum}"
        return handler.generate_schema(Annotated[int, limits, BeforeValidator(to_int), expects(text)])


class NotNull:
    """Removes `null` from an Optional: the key may be missing, but it may not be null."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return dict(handler(source))["schema"]


Maybe = Annotated[Optional[T], NotNull()]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
AnyPositive = Annotated[Finite, Field(gt=0), expects("a number above 0")]
AnyAtLeast0 = Annotated[Finite, Field(ge=0), expects("a number of at least 0")]
Positive = Annotated[AnyPositive, Limits(MIN_NUMBER, MAX_NUMBER)]
AtLeast0 = Annotated[AnyAtLeast0, Limits(0, MAX_NUMBER)]
PositiveSeconds = Annotated[AnyPositive, Limits(MIN_RATE, MAX_SECONDS)]
Seconds = Annotated[AnyAtLeast0, Limits(0, MAX_SECONDS)]
RequestRate = Annotated[AnyPositive, Limits(MIN_RATE, MAX_RATE)]
RequestRate0 = Annotated[AnyAtLeast0, Limits(0, MAX_RATE)]
Numbers = Annotated[list[AtLeast0], Field(min_length=1), expects("a list of numbers of at least 0")]
Whole = Annotated[int, WholeUpTo(MAX_INT)]
Length = Annotated[int, WholeUpTo(MAX_TOKENS)]
Int = Annotated[int, BeforeValidator(to_whole)]
Number = Annotated[float, BeforeValidator(reject_bool)]
PositiveInt = Annotated[int, Field(gt=0, le=MAX_INT), BeforeValidator(to_whole)]
Duration = Annotated[float, Field(ge=0, le=MAX_SECONDS), BeforeValidator(reject_bool)]  # in seconds
Text = Annotated[str, Field(strict=True, min_length=1), expects("a text")]
Flag = Annotated[bool, Field(strict=True), expects("true or false")]


class Keys(BaseModel):
    """A file or a section of one. Unknown keys are errors, unless a subclass allows them."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    others: ClassVar[tuple[str, ...]] = ()  # keys of the section's other kinds, for messages
    either: ClassVar[tuple[tuple[str, ...], ...]] = ()  # groups of keys; exactly one group must be present

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            raise expected_error("keys and values")
        known, required = keys_of(cls)
        for key in tree if cls.model_config.get("extra") == "forbid" else ():
            if key not in known:
                error = invalid_error(f"unknown key; known: {', '.join(known)}{cls.suggest(str(key), known)}")
                raise error_at(str(key), error, tree[key])
        groups = [group for group in cls.either if any(key in tree for key in group)]
        if cls.either and len(groups) != 1:
            names = " and ".join("/".join(group) for group in cls.either)
            raise invalid_error(f"expected one of {names}, got {'both' if groups else 'none'}")
        missing = [key for key in (*required, *sum(groups, ())) if key not in tree]
        return {**tree, **{key: Missing() for key in missing}} if missing else tree

    @classmethod
    def suggest(cls, key: str, known: Sequence[str]) -> str:
        """Return the end of the message for an unknown key."""
        return did_you_mean(key, known)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        json_schema = handler(schema)
        if cls.either:
            handler.resolve_ref_schema(json_schema)["oneOf"] = [{"required": [*group]} for group in cls.either]
        return json_schema


@cache  # a sweep validates thousands of scenarios
def keys_of(model: type[Keys]) -> tuple[list[str], list[str]]:
    """Return the keys that a section may have, and those that it must have."""
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    return [*model.model_fields, *model.others], required


KIND = Field(description="name of the kind")


@dataclass(frozen=True)
class Selected:
    """Validates a section with the model that a function selects. The others are built for the JSON schema only."""

    kinds: Any  # all models of the section
    validate: Callable[[Any, ValidationInfo], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return with_info_plain_validator_function(self.validate)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(TypeAdapter(self.kinds).core_schema)


def models_by_kind(*models: type[Keys]) -> dict[str, type[Keys]]:
    """Return models by their `kind`."""
    return {get_args(model.model_fields["kind"].annotation)[0]: model for model in models}


def validate_kind(tree: Any, kinds: Mapping[str, type[Keys]]) -> Keys:
    """Validate a section with the model of its `kind`."""
    if not isinstance(tree, Mapping):
        raise expected_error("keys and values")
    kind = tree.get("kind", Missing())
    if not isinstance(kind, str) or kind not in kinds:
        raise error_at("kind", expected_error(f"one of {', '.join(kinds)}"), kind)
    return kinds[kind].model_validate(tree)


def key_path(location: Sequence[Union[str, int]]) -> str:
    """Return pydantic's location of an error as `mix[0].arrivals.rate`, without the types of a union."""
    parts = location[:-2] if location and location[-1] == "[key]" else location
    parts = [part for part in parts if part != "str" and not str(part).startswith(("dict[", "list["))]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{shorten(part)}" for part in parts).removeprefix(".")


def format_fault(fault: ErrorDetails, key: str) -> str:
    """Return one error of pydantic as one line."""
    error = fault.get("ctx", {}).get("error")
    if isinstance(error, BadInput):
        return str(error)
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input should be ").partition(", unable to")[0]
    message = "keys and values" if "dictionary" in message else message
    text = message if fault["type"] == "wrong" else f"expected {message}, got {quote(fault['input'])}"
    return f"{key}: {text}" if key else text


M = TypeVar("M", bound=BaseModel)


def validate(model: type[M], tree: Any, where: str) -> M:
    """Return the model of a section, or raise a one-line error that starts with `where` and names the key."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise BadInput(f"{where}: {first_error(error)}") from None


def first_error(error: ValidationError, *above: str) -> str:
    """Return pydantic's first error as one line; `above` are the keys that contain the section."""
    fault = error.errors()[0]
    return format_fault(fault, key_path((*above, *fault["loc"])))


StoredNumber = Annotated[float, Field(ge=-MAX_RESULT, le=MAX_RESULT), expects("a number")]
Index = Annotated[int, Field(ge=0, le=int(MAX_NUMBER)), expects("a whole number of at least 0")]


class Stored(Keys):
    """A file that servesim wrote and reads back, or a part of one. A user can edit or damage it.

    Unknown keys are kept: a newer version of servesim may have written them.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{0,18})?(?:[eE]\+?\d{1,2})?)\s*([A-Za-z]*)\s*")
MAX_BYTES = 10**18
EXPECTED = "a size above 0, such as 141GB or 40GiB"


def to_bytes(value: Any) -> Any:
    """Return a size as a number of bytes; raise an error for other values."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = str(value)
    match = SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].upper() not in UNITS:
        raise expected_error(EXPECTED)
    size = float(match[1]) * UNITS[match[2].upper()]
    if not (math.isfinite(size) and 1 <= size <= MAX_BYTES):
        raise expected_error(f"{EXPECTED}, at most {MAX_BYTES:g} bytes")
    return int(size)


ByteSize = Annotated[int, BeforeValidator(to_bytes, json_schema_input_type=Union[int, str]), Field(gt=0)]


def format_bytes(size: float) -> str:
    """Return a size with a decimal unit and three digits or more, e.g. 13.5 GB."""
    unit, name = next(((UNITS[name], name) for name in ("TB", "GB", "MB", "KB") if size >= UNITS[name]), (1, "bytes"))
    number = size / unit
    return f"{number:,.{max(0, 2 - int(math.log10(number)))}f} {name}" if number >= 1 else f"{number:g} {name}"

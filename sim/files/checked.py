"""Validate sections of a file with pydantic: types of values, and one-line errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Optional, TypeVar, Union, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function
from servesim.core import BadInput
from servesim.core.limits import MAX_INT, MAX_NUMBER, MAX_RATE, MAX_SECONDS, MAX_TOKENS, MIN_NUMBER, MIN_RATE

from .read import quote, shorten

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
Whole = Annotated[
    int, Field(strict=True, ge=1, le=MAX_INT), BeforeValidator(to_int), expects(f"a whole number from 1 to {MAX_INT}")
]
Length = Annotated[
    int,
    Field(strict=True, ge=1, le=MAX_TOKENS),
    BeforeValidator(to_int),
    expects(f"a whole number from 1 to {MAX_TOKENS}"),
]
Int = Annotated[int, BeforeValidator(reject_bool)]
Number = Annotated[float, BeforeValidator(reject_bool)]
Text = Annotated[str, Field(strict=True, min_length=1), expects("a text")]
Flag = Annotated[bool, Field(strict=True), expects("true or false")]


class Keys(BaseModel):
    """A section of a file. Unknown keys are errors, unless a subclass allows them."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    others: ClassVar[tuple[str, ...]] = ()  # keys of the section's other kinds, for messages
    either: ClassVar[tuple[tuple[str, ...], ...]] = ()  # groups of keys; exactly one group must be present

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            raise expected_error("keys and values")
        known = [*cls.model_fields, *cls.others]
        for key in tree if cls.model_config.get("extra") == "forbid" else ():
            if key not in known:
                raise invalid_error(f"unknown key {quote(key)}: expected {', '.join(known)}")
        groups = [group for group in cls.either if any(key in tree for key in group)]
        if cls.either and len(groups) != 1:
            names = " and ".join("/".join(group) for group in cls.either)
            raise invalid_error(f"expected one of {names}, got {'both' if groups else 'none'}")
        required = [name for name, field in cls.model_fields.items() if field.is_required()]
        missing = [key for key in (*required, *sum(groups, ())) if key not in tree]
        return {**tree, **{key: Missing() for key in missing}}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        json_schema = handler(schema)
        if cls.either:
            handler.resolve_ref_schema(json_schema)["oneOf"] = [{"required": [*group]} for group in cls.either]
        return json_schema


KIND = Field(description="name of the kind")


def models_by_kind(*models: type[Keys]) -> dict[str, type[Keys]]:
    """Return models by their `kind`."""
    return {get_args(model.model_fields["kind"].annotation)[0]: model for model in models}


def validate_kind(tree: Any, kinds: Mapping[str, type[Keys]]) -> Keys:
    """Validate a section with the model of its `kind`."""
    if not isinstance(tree, Mapping):
        raise expected_error("keys and values")
    kind = tree.get("kind", Missing())
    if not isinstance(kind, str) or kind not in kinds:
        error = expected_error(f"one of {', '.join(kinds)}")
        raise ValidationError.from_exception_data("", [{"type": error, "loc": ("kind",), "input": kind}])
    return kinds[kind].model_validate(tree)


def key_path(location: Sequence[Union[str, int]]) -> str:
    """Return pydantic's location of an error as `mix[0].arrivals.rate`."""
    parts = location[:-2] if location and location[-1] == "[key]" else location
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

"""Sections of a file, checked with pydantic: the kinds of value, and one line that names the key that is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from servesim.core import BadInput

from .read import shown

T = TypeVar("T")
MOST = 2**31 - 1


class Nothing:
    """The value of a required key that is not there, as messages show it."""

    def __repr__(self) -> str:
        return "nothing"


def expected(text: str) -> PydanticCustomError:
    """Return an error that reads `KEY: expected TEXT, got VALUE`."""
    return PydanticCustomError("expected", text)


def wrong(text: str) -> PydanticCustomError:
    """Return an error that reads `KEY: TEXT`."""
    return PydanticCustomError("wrong", text)


def says(text: str) -> WrapValidator:
    """Return a validator that says what was expected in place of pydantic's own words."""

    def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(value)
        except ValidationError as error:
            if error.errors()[0]["loc"]:
                raise  # a part of the value is wrong, and its error says so
            raise expected(text) from None

    return WrapValidator(check)


def whole(value: Any) -> Any:
    """Return 1e4 as the whole number that it is."""
    return int(value) if type(value) is float and value.is_integer() else value


class NotNull:
    """Takes `null` out of an Optional: the key may be left out, but null is no value of it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return dict(handler(source))["schema"]


Maybe = Annotated[Optional[T], NotNull()]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[Finite, Field(gt=0), says("a number above 0")]
AtLeast0 = Annotated[Finite, Field(ge=0), says("a number of at least 0")]
Numbers = Annotated[list[AtLeast0], Field(min_length=1), says("a list of numbers of at least 0")]
Whole = Annotated[
    int, Field(strict=True, ge=1, le=MOST), BeforeValidator(whole), says(f"a whole number from 1 to {MOST}")
]
Text = Annotated[str, Field(strict=True, min_length=1), says("a text")]
Flag = Annotated[bool, Field(strict=True), says("true or false")]


class Keys(BaseModel):
    """A section whose unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    others: ClassVar[tuple[str, ...]] = ()  # keys of other forms of the section, for messages
    either: ClassVar[tuple[tuple[str, ...], ...]] = ()  # groups of keys, of which one must be there

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            raise expected("keys and values")
        known = [*cls.model_fields, *cls.others]
        for key in given:
            if key not in known:
                raise wrong(f"unknown key {shown(key)}: expected {', '.join(known)}")
        groups = [group for group in cls.either if any(key in given for key in group)]
        if cls.either and len(groups) != 1:
            names = " and ".join("/".join(group) for group in cls.either)
            raise wrong(f"expected one of {names}, got {'both' if groups else 'none'}")
        required = [name for name, field in cls.model_fields.items() if field.is_required()]
        absent = [key for key in (*required, *sum(groups, ())) if key not in given]
        return {**given, **{key: Nothing() for key in absent}}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        described = handler(schema)
        if cls.either:
            handler.resolve_ref_schema(described)["oneOf"] = [{"required": [*group]} for group in cls.either]
        return described


KIND = Field(description="which of the kinds this is")


def kinds_of(*models: type[Keys]) -> dict[str, type[Keys]]:
    """Return models by the kind that each of them names."""
    return {get_args(model.model_fields["kind"].annotation)[0]: model for model in models}


def of_kind(given: Any, kinds: Mapping[str, type[Keys]]) -> Keys:
    """Return a section as the model that its `kind` names."""
    if not isinstance(given, Mapping):
        raise expected("keys and values")
    kind = given.get("kind", Nothing())
    if not isinstance(kind, str) or kind not in kinds:
        error = expected(f"one of {', '.join(kinds)}")
        raise ValidationError.from_exception_data("", [{"type": error, "loc": ("kind",), "input": kind}])
    return kinds[kind].model_validate(given)


def path(place: Sequence[Union[str, int]]) -> str:
    """Return a key as messages name it: `mix[0].arrivals.rate`."""
    parts = place[:-2] if place and place[-1] == "[key]" else place
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def complaint(fault: ErrorDetails, key: str) -> str:
    """Return what pydantic found wrong with a key as one line."""
    error = fault.get("ctx", {}).get("error")
    if isinstance(error, BadInput):
        return str(error)
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input should be ").partition(", unable to")[0]
    message = "keys and values" if "dictionary" in message else message
    text = message if fault["type"] == "wrong" else f"expected {message}, got {shown(fault['input'])}"
    return f"{key}: {text}" if key else text


def first_fault(error: ValidationError, *above: str) -> str:
    """Return pydantic's first complaint about a section that stands below the keys `above`."""
    fault = error.errors()[0]
    return complaint(fault, path((*above, *fault["loc"])))

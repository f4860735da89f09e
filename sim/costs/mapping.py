"""Convert cost models to and from the mapping in a profile or a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from servesim.core import BadInput, StepCost
from servesim.core.limits import MAX_COST, MAX_INT, MAX_NUMBER, is_number
from servesim.files.read import check_keys, quote

from .derived import SampledCost, SamplingTerm
from .linear import LinearCost
from .parts import PART_FIELDS, PartsCost

KINDS = ("linear", "parts")
REQUIRED_PARTS = ("prefill", "decode")
FRACTIONS = ("overlap", "expert_share", "width_power")  # terms that are not seconds
SELECTION = "selection"  # seconds per step and per row to add, because tokens are selected in another way


def cost_from(mapping: Mapping[str, Any], where: str) -> StepCost:
    """Build a cost model from the mapping of a profile or a scenario."""
    terms = dict(mapping)
    if SELECTION in terms:  # written by `cost_mapping` only
        added = check_selection(terms.pop(SELECTION), f"{where}.{SELECTION}")
        return SampledCost(cost_from(terms, where), added)
    kind = terms.pop("kind", "linear")
    if not isinstance(kind, str) or kind not in KINDS:
        raise BadInput(f"{where}.kind: expected one of {', '.join(KINDS)}, got {quote(kind)}")
    if kind == "parts":
        return parts_from(terms, where)
    linear: LinearCost = terms_from(LinearCost, terms, where)
    return linear


def parts_from(terms: Mapping[str, Any], where: str) -> PartsCost:
    """Build a cost model in parts."""
    check_keys(terms, list(PART_FIELDS), where)
    if not all(name in terms for name in REQUIRED_PARTS):
        raise BadInput(f"{where}: expected {' and '.join(REQUIRED_PARTS)}, got {', '.join(terms) or 'none'}")
    parts = {}
    for name, values in terms.items():
        if not isinstance(values, Mapping):
            raise BadInput(f"{where}.{name}: expected keys and values, got {quote(values)}")
        field = PART_FIELDS[name]
        parts[field] = terms_from(type(getattr(PartsCost(), field)), values, f"{where}.{name}")
    return PartsCost(**parts)


def terms_from(kind: type[Any], terms: Mapping[str, Any], where: str) -> Any:
    """Build a dataclass of terms. The default of a term says what it is: a flag, a number, buckets or a curve."""
    defaults = {field.name: field.default for field in fields(kind)}
    check_keys(terms, list(defaults), where)
    return kind(**{name: check_term(name, defaults[name], value, f"{where}.{name}") for name, value in terms.items()})


def check_term(name: str, default: Any, value: Any, where: str) -> Any:
    """Validate one term: numbers are at least 0, curves rise."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise BadInput(f"{where}: expected true or false, got {quote(value)}")
        return value
    if default is None or isinstance(default, float):
        return check_number(value, where, maximum=1.0 if name in FRACTIONS else MAX_COST)
    if isinstance(default, int):
        return check_buckets([value], where)[0] if value else 0
    if not default:
        return check_buckets(value, where) if value else ()
    points = check_points(value, 3 if name == "rows" else 2, where)
    for k, (low, high) in enumerate(zip(points, points[1:])):
        if high[1] < low[1]:
            raise BadInput(f"{where}[{k + 1}]: expected at least {low[1]:g} s as in the point before, got {high[1]:g}")
    return tuple(points)


def check_buckets(value: Any, where: str) -> tuple[int, ...]:
    """Validate padding buckets: increasing whole numbers of tokens."""
    numbers = check_increasing(value, where, 1, MAX_INT)
    for k, number in enumerate(numbers):
        if number % 1:
            raise BadInput(f"{where}[{k}]: expected a whole number of tokens, got {quote(number)}")
    return tuple(map(int, numbers))


def check_selection(value: Any, where: str) -> SamplingTerm:
    """Validate the seconds to add for another selection of tokens."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise BadInput(f"{where}: expected seconds per step and per row, got {quote(value)}")
    step, row = (float(check_number(number, where, -MAX_COST)) for number in value)
    return SamplingTerm(step, row)


def check_number(value: Any, where: str, minimum: float = 0.0, maximum: float = MAX_COST) -> Any:
    """Validate a number of seconds."""
    if not is_number(value, minimum, maximum):
        unit = "number of seconds" if maximum == MAX_COST else "number"
        raise BadInput(f"{where}: expected a {unit} from {minimum:g} to {maximum:g}, got {quote(value)}")
    return value


def check_points(points: Any, width: int, where: str) -> list[tuple[float, ...]]:
    """Validate the points of a curve: numbers of at least 0, the first one of each point increasing."""
    if not isinstance(points, (list, tuple)) or not points:
        raise BadInput(f"{where}: expected a list of points, got {quote(points)}")
    for k, point in enumerate(points):
        valid = isinstance(point, (list, tuple)) and 2 <= len(point) <= width
        if not valid or any(not is_number(x, 0, MAX_COST if i else MAX_NUMBER) for i, x in enumerate(point)):
            count = f"{'2 to ' if width > 2 else ''}{width} numbers of at least 0"
            raise BadInput(f"{where}[{k}]: expected {count}, seconds at most {MAX_COST:g}, got {quote(point)}")
    check_increasing([point[0] for point in points], where)
    return [tuple(point) for point in points]


def check_increasing(numbers: Any, where: str, minimum: float = 0.0, maximum: float = MAX_NUMBER) -> list[Any]:
    """Validate a list of increasing numbers."""
    if not isinstance(numbers, (list, tuple)) or not numbers:
        raise BadInput(f"{where}: expected a list of numbers, got {quote(numbers)}")
    for k, number in enumerate(numbers):
        check_number(number, f"{where}[{k}]", minimum, maximum)
        if k and number <= numbers[k - 1]:
            raise BadInput(f"{where}[{k}]: expected more than {numbers[k - 1]:g} first, got {number:g}")
    return list(numbers)


def cost_mapping(cost: StepCost) -> dict[str, Any]:
    """Return a cost model as the input of `cost_from`, without default values."""
    if type(cost) is PartsCost:
        parts = {name: changed(getattr(cost, field)) for name, field in PART_FIELDS.items()}
        return {"kind": "parts", **{name: part for name, part in parts.items() if part or name in REQUIRED_PARTS}}
    if type(cost) is SampledCost:
        return {**cost_mapping(cost.cost), SELECTION: list(cost.added)}
    if type(cost) is LinearCost:
        return {"kind": "linear", **changed(cost)}
    raise BadInput(f"cost: a {type(cost).__name__} cannot be written to a profile")


def changed(instance: Any) -> dict[str, Any]:
    """Return the public fields of a dataclass that differ from their defaults."""
    public = [f for f in fields(instance) if not f.name.startswith("_")]
    values = {f.name: getattr(instance, f.name) for f in public if getattr(instance, f.name) not in (f.default, [])}
    return {name: to_list(value) for name, value in values.items()}


def to_list(value: Any) -> Any:
    """Return a value with tuples as lists, for YAML."""
    return [to_list(inner) for inner in value] if isinstance(value, (list, tuple)) else value

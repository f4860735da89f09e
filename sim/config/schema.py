"""The JSON schema of scenario files, with the fields of every policy and router."""

from __future__ import annotations

from typing import Any, get_origin

from servesim.core.fields import PolicyField, policy_fields
from servesim.core.limits import MAX_NUMBER
from servesim.policies import POLICIES
from servesim.routers import ROUTERS

from .registry import SPECULATIVE
from .scenario import Scenario

TYPES = {
    int: "integer", float: "number", bool: "boolean", str: "string", tuple: "array", list: "array", type(None): "null",
}  # fmt: skip


def scenario_schema() -> dict[str, Any]:
    """Return the JSON schema of a scenario. The name of a policy or a router selects the schema of its fields."""
    schema = Scenario.model_json_schema()
    router = schema["$defs"]["Cluster"]["properties"]["router"]
    router["type"] = ["object", "string"]
    for section, what, known in (
        (schema["properties"]["policy"], "policy", POLICIES),
        (router, "router", ROUTERS),
    ):
        name = {"type": "string", "description": f"name of a {what}, or FILE.py:CLASS", "examples": [*known]}
        section["properties"] = {"name": name}
        section["allOf"] = [
            {"if": {"properties": {"name": {"const": one}}, "required": ["name"]}, "then": fields_schema(kind)}
            for one, kind in known.items()
        ]
    return schema


def fields_schema(kind: type[Any]) -> dict[str, Any]:
    """Return the JSON schema of the fields of a policy or router class."""
    known = policy_fields(kind).items()
    rules = {name: field_schema(field) for name, field in known if name not in SPECULATIVE}
    return {"properties": {"name": {}, **rules}, "additionalProperties": False}


def field_schema(field: PolicyField) -> dict[str, Any]:
    """Return the JSON schema of a field."""
    about = {"description": field.help, "default": field.default}
    if field.choices:
        return {**about, "enum": [*field.choices]}
    names = [TYPES[get_origin(kind) or kind] for kind in field.types]
    rule: dict[str, Any] = {**about, "type": names if len(names) > 1 else names[0]}
    if field.range is not None:
        minimum, below = field.range
        top = {"maximum": MAX_NUMBER} if below is None else {"exclusiveMaximum": below}
        rule |= {"minimum": minimum, **top}
    return rule

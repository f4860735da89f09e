"""Find and build policies: built-in names, user files and presets. Routers are built by the same functions."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Optional, TypeVar, get_origin

from servesim.core import BadInput, Policy
from servesim.core.fields import PolicyField, policy_fields
from servesim.core.limits import MAX_NUMBER, is_number
from servesim.engine.rules import EngineRules
from servesim.files.read import did_you_mean, quote, show_path
from servesim.policies import FAMILIES, POLICIES

from .user_code import class_line, error_text, is_user_class, load_file, names_file, user_line

T = TypeVar("T")
SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
SPECULATIVE = {  # fields that the section `speculative` of a scenario sets -> its keys
    "num_speculative_tokens": "tokens", "speculative_method": "method", "mtp_modules": "modules",
}  # fmt: skip
SIMPLE_TYPES = {int, float, bool, str, type(None)}
ENGINE = "engine"  # the policy of an installed engine; it needs a worker process, so it is loaded by its name


def policy_class(name: Any) -> type[Policy]:
    """Return a policy by its name in POLICIES, or as FILE.py:NAME."""
    if not isinstance(name, str):
        raise BadInput(f"policy.name: expected the name of a policy, got {quote(name)}")
    if name in POLICIES:
        return POLICIES[name]
    if name == ENGINE:
        kind: type[Policy] = importlib.import_module("servesim.calibrate.engines.policy").EnginePolicy
        return kind
    if names_file(name):
        return class_from_file(name, Policy, "policy", "decide")
    known = ", ".join([*POLICIES, ENGINE])
    hint = f"; {name} is a preset: --preset {name}" if name in presets() else did_you_mean(name, POLICIES)
    raise BadInput(f"policy.name: no policy {quote(name)}; known: {known}, or path/to/file.py:Name{hint}")


def is_class(kind: Any, base: type[Any]) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def class_from_file(name: str, base: type[T], key: str, *methods: str) -> type[T]:
    """Load a class of a user file, given as FILE.py:NAME, with one of some methods; a changed file is loaded again."""
    path, _, attribute = (name if ".py:" in name else f"{name}:").rpartition(":")
    module = load_file(path, name)
    kind: Any = getattr(module, attribute, None)
    if not is_class(kind, base):
        found = [f"{path}:{k}" for k, value in vars(module).items() if is_class(value, base) and value is not base]
        hint = f", e.g. {', '.join(found)}" if found else f"; {path} has none"
        raise BadInput(f"{key} {show_path(name)}: expected a {base.__name__} class{hint}")
    if all(getattr(kind, method) is getattr(base, method) for method in methods):
        raise BadInput(f"{key} {show_path(name)}: {class_line(kind)}: {attribute} has no method {methods[0]}")
    found_class: type[T] = kind
    return found_class


def make_policy(policy: Mapping[str, Any]) -> Policy:
    """Build a policy from its name and fields; check types and ranges."""
    settings = dict(policy)
    name = settings.pop("name", None)
    kind = policy_class(name)
    known = fields_of(kind)
    if "flags" in known:  # those of an engine, which checks them itself
        settings["flags"] = [
            *settings.get("flags", ()),
            *((key, settings.pop(key)) for key in sorted(set(settings) - set(known))),
        ]
    fields = convert_fields(kind, settings, "policy", name)
    if not is_user_class(kind):
        return build(kind, fields, "policy", name)
    made = build(kind, fields, "policy", name, check_rules)
    for field in known.values():  # a default may have another type, and an own `__init__` may set none
        value = getattr(made, field.name, field.default)
        if set(field.types) <= SIMPLE_TYPES:
            value = convert(f"policy {show_path(name)}: {class_line(kind)}: {field.name}", value, field.types)
        object.__setattr__(made, field.name, value)
    return made


def check_rules(policy: Policy) -> None:
    """Check that the rules of a user's policy have their type."""
    rules = policy.rules()
    assert rules is None or isinstance(rules, EngineRules), f"rules: expected EngineRules, got {quote(rules)}"


def convert_fields(kind: type[Any], settings: Mapping[str, Any], key: str, name: Any) -> dict[str, Any]:
    """Return the settings of a policy or a router with the types of its fields."""
    known = fields_of(kind, key)
    for field in settings:
        if field not in known:
            hint = did_you_mean(field, known)
            raise BadInput(f"{key}.{field}: unknown key of {name}; known: {', '.join(known) or 'none'}{hint}")
    return {field: convert(f"{key}.{field}", value, known[field].types) for field, value in settings.items()}


def build(
    kind: type[T], fields: Mapping[str, Any], key: str, name: Any, check: Callable[[T], object] = lambda made: None
) -> T:
    """Build and check a policy or a router; an error names the field, or the line of the user file that raised it."""
    try:
        made = kind(**fields)
        check(made)
        return made
    except (Exception, SystemExit) as error:
        is_field = isinstance(error, ValueError) and str(error).partition(":")[0] in fields_of(kind)
        if is_field or (not is_user_class(kind) and isinstance(error, (ValueError, TypeError))):
            raise BadInput(f"{key}.{error}") from None
        if not is_user_class(kind):
            raise
        place = user_line(error) or class_line(kind, "__post_init__")
        raise BadInput(f"{key} {show_path(name)}: {place}: {error_text(error)}") from None


def fields_of(kind: type[Any], key: str = "policy") -> dict[str, PolicyField]:
    """Return the fields of a policy or router class; raise BadInput if a user's class has a type that is not valid."""
    try:
        return policy_fields(kind)
    except Exception as error:  # an annotation may be any expression
        if not is_user_class(kind):
            raise
        message = f"{class_line(kind)}: the type of a field is not valid: {error_text(error)}"
        raise BadInput(f"{key} {kind.__name__}: {message}") from None


def own_fields_first(kind: type[Policy]) -> list[PolicyField]:
    """Return the fields that the section `policy` may set; those that all policies have come last."""
    found = [field for field in fields_of(kind).values() if field.name not in SPECULATIVE]
    return sorted(found, key=lambda field: field.name in policy_fields(Policy))


def convert(key: str, value: Any, kinds: Sequence[Any]) -> Any:
    """Return a value converted to one of the types of a field; raise BadInput if that is not possible."""
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if kind is float and is_number(value):
            return float(value)
        if kind is bool and str(value).lower() in SWITCHES:
            return SWITCHES[str(value).lower()]
        if kind is int and is_number(value) and value == int(value):  # 2e3
            return int(value)
        if kind is str and isinstance(value, str):
            return value
        origin = get_origin(kind) or kind
        if origin in (tuple, list) and isinstance(value, (list, tuple)):
            return tuple(value)
    names = " or ".join("null" if kind is type(None) else getattr(kind, "__name__", str(kind)) for kind in kinds)
    limit = f" of at most {MAX_NUMBER:g}" if is_number(value, -math.inf, math.inf) and not is_number(value) else ""
    raise BadInput(f"{key}: expected {names}{limit}, got {quote(value)}")


def presets() -> dict[str, Path]:
    """Return the bundled presets and their files."""
    folder = Path(str(files("servesim.policies")))
    found = [path for family in FAMILIES for path in folder.glob(f"{family}/presets/*.yaml")]
    return {path.stem: path for path in sorted(found, key=lambda path: path.name)}


def preset(name: str) -> dict[str, Any]:
    """Return the scenario keys of a preset."""
    from servesim.files.yaml_reader import read_yaml

    path = presets().get(name)
    if path is None:
        hint = f"; {name} is a policy: --policy {name}" if name in POLICIES else did_you_mean(name, presets())
        raise BadInput(f"preset {quote(name)}: no such preset; known: {', '.join(presets())}{hint}")
    tree: dict[str, Any] = read_yaml(path)
    return tree


def about_preset(name: str) -> Optional[str]:
    """Return the comment at the top of a preset."""
    lines = presets()[name].read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#")) or None

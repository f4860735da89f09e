"""Find policies: built-in names, user files, entry points and presets; read the help of their fields."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import sys
import traceback
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any, Optional, Union, get_args, get_origin, get_type_hints

from servesim.core import BadInput, Policy
from servesim.files.suggestions import did_you_mean
from servesim.policies import POLICIES, match_fields

USER_MODULE_PREFIX = "servesim_user_"  # module names of user policies
SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
HINTS: dict[type[Policy], dict[str, Any]] = {}


def policy_class(name: str) -> type[Policy]:
    """Return a policy by its name in POLICIES, as FILE.py:NAME, or from an entry point."""
    if name in POLICIES:
        return POLICIES[name]
    if ".py:" in name or name.endswith(".py"):
        return from_file(name if ".py:" in name else f"{name}:")
    for point in importlib.metadata.entry_points(group="servesim.policies"):
        if point.name == name:
            policy: type[Policy] = point.load()
            return policy
    known = ", ".join(POLICIES)
    hint = f"; {name} is a preset: --preset {name}" if name in presets() else did_you_mean(name, POLICIES)
    raise BadInput(f"policy.name: no policy {name!r}; known: {known}, or path/to/file.py:Name{hint}")


def from_file(name: str) -> type[Policy]:
    """Load a policy class from a user file, given as FILE.py:NAME; a changed file is loaded again."""
    path, _, attribute = name.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise BadInput(f"policy {name}: {path}: no such file")
    module = load_module(file.resolve(), file.read_bytes(), name.rstrip(":"), path)
    policy = getattr(module, attribute, None)
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        kinds = {k: v for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Policy)}
        known = ", ".join(f"{path}:{attribute}" for attribute, kind in kinds.items() if kind is not Policy)
        hint = f", e.g. {known}" if known else f"; {path} has none"
        raise BadInput(f"policy {name.rstrip(':')}: expected a Policy class{hint}")
    return policy


@lru_cache(maxsize=64)
def load_module(file: Path, source: bytes, name: str, path: str) -> ModuleType:
    """Return a user file as a module, built from its current text: Python's cache compares whole seconds only."""
    module = ModuleType(f"{USER_MODULE_PREFIX}{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, str(file), "exec", dont_inherit=True), module.__dict__)
    except Exception as error:
        raise BadInput(f"policy {name}: {path} does not load: {type(error).__name__}: {error}") from None
    return module


def user_policy_files() -> list[str]:
    """Return the files of the user policies that were loaded."""
    return [str(module.__file__) for name, module in sys.modules.items() if name.startswith(USER_MODULE_PREFIX)]


def user_policy_line(error: BaseException) -> Optional[str]:
    """Return FILE:LINE of a user policy that raised an error, or None."""
    result = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).startswith(USER_MODULE_PREFIX):
            result = f"{frame.f_code.co_filename}:{line}"
    return result


def make_policy(policy: Mapping[str, Any]) -> Policy:
    """Build a policy from its name and fields; check types and ranges."""
    settings = dict(policy)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise BadInput(f"policy.name: expected the name of a policy, got {name!r}")
    kind = policy_class(name)
    hints = hints_of(kind)
    known = [field.name for field in fields(kind)]
    try:
        settings = match_fields(kind, settings)
    except ValueError as error:
        raise BadInput(f"policy.{error}") from None
    for key, value in settings.items():
        if key not in known:
            raise BadInput(f"policy.{key}: unknown key of {name}; known: {', '.join(known)}{did_you_mean(key, known)}")
        settings[key] = convert(f"policy.{key}", value, hints[key])
    try:
        return kind(**settings)
    except (ValueError, TypeError) as error:
        raise BadInput(f"policy.{error}") from None


def hints_of(kind: type[Policy]) -> dict[str, Any]:
    """Return the types of a policy's fields, cached: a sweep builds thousands of policies."""
    if kind not in HINTS:
        HINTS[kind] = get_type_hints(kind)
    return HINTS[kind]


def convert(key: str, value: Any, hint: Any) -> Any:
    """Return a value converted to the type of a field; raise BadInput if that is not possible."""
    kinds = get_args(hint) if get_origin(hint) is Union else (hint,)
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if kind is bool and str(value).lower() in SWITCHES:
            return SWITCHES[str(value).lower()]
        if kind is int and isinstance(value, float) and value.is_integer():  # 2e3
            return int(value)
        if kind in (int, str) and isinstance(value, kind) and not isinstance(value, bool):
            return value
        origin = get_origin(kind) or kind
        if origin in (tuple, list) and isinstance(value, (list, tuple)):
            return tuple(value)
    names = " or ".join("null" if kind is type(None) else getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise BadInput(f"{key}: expected {names}, got {value!r}")


def field_help(kind: type[Policy]) -> dict[str, str]:
    """Return the help of every field: its trailing comment."""
    result: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, Policy):
            try:
                source = inspect.getsource(base)
            except (OSError, TypeError):
                continue
            for match in re.finditer(r"^    (\w+): [^#\n]+?  # (.+)$", source, re.MULTILINE):
                result[match[1]] = match[2]
    return result


def presets() -> dict[str, Path]:
    """Return the bundled presets and their files."""
    folder = Path(str(files("servesim.policies.presets")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def preset(name: str) -> dict[str, Any]:
    """Return the scenario keys of a preset."""
    from servesim.files.yaml_reader import read_yaml

    path = presets().get(name)
    if path is None:
        hint = f"; {name} is a policy: --policy {name}" if name in POLICIES else did_you_mean(name, presets())
        raise BadInput(f"preset {name!r}: no such preset; known: {', '.join(presets())}{hint}")
    tree: dict[str, Any] = read_yaml(path)
    return tree


def about_preset(name: str) -> Optional[str]:
    """Return the comment at the top of a preset."""
    lines = presets()[name].read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#")) or None

"""Finding policies: the built-in table, presets, a user's own file, entry points; and their fields as help."""

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
from servesim.files.suggestions import meant
from servesim.policies import POLICIES

USERS = "servesim_user_"  # what modules of users' own policies are called
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
            found: type[Policy] = point.load()
            return found
    known = ", ".join(POLICIES)
    hint = f"; {name} is a preset: --preset {name}" if name in presets() else meant(name, POLICIES)
    raise BadInput(f"policy.name: no policy {name!r}; known: {known}, or path/to/file.py:Name{hint}")


def from_file(name: str) -> type[Policy]:
    """Load a policy class from a user's file, given as FILE.py:NAME; a file that was changed is loaded anew."""
    path, _, attribute = name.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise BadInput(f"policy {name}: {path}: no such file")
    module = loaded(file.resolve(), file.read_bytes(), name.rstrip(":"), path)
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        kinds = {k: v for k, v in vars(module).items() if isinstance(v, type) and issubclass(v, Policy)}
        has = ", ".join(f"{path}:{one}" for one, kind in kinds.items() if kind is not Policy)
        told = f", e.g. {has}" if has else f"; {path} has none"
        raise BadInput(f"policy {name.rstrip(':')}: expected a Policy class{told}")
    return found


@lru_cache(maxsize=64)
def loaded(file: Path, source: bytes, name: str, path: str) -> ModuleType:
    """Return a user's file as a module, made of what it says now: Python's own cache goes by whole seconds."""
    module = ModuleType(f"{USERS}{file.stem}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, str(file), "exec", dont_inherit=True), module.__dict__)
    except Exception as error:
        raise BadInput(f"policy {name}: {path} does not load: {type(error).__name__}: {error}") from None
    return module


def own_policies() -> list[str]:
    """Return the files of users' own policies that were loaded."""
    return [str(module.__file__) for name, module in sys.modules.items() if name.startswith(USERS)]


def blamed(error: BaseException) -> Optional[str]:
    """Return the line of a user's own policy in which an error arose, None where it arose elsewhere."""
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).startswith(USERS):
            place = f"{frame.f_code.co_filename}:{line}"
    return place


def make_policy(given: Mapping[str, Any]) -> Policy:
    """Build a policy from its name and fields, checking types and ranges."""
    settings = dict(given)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise BadInput(f"policy.name: expected the name of a policy, got {name!r}")
    kind = policy_class(name)
    hints = hints_of(kind)
    known = [field.name for field in fields(kind)]
    for key, value in settings.items():
        if key not in known:
            raise BadInput(f"policy.{key}: unknown key of {name}; known: {', '.join(known)}{meant(key, known)}")
        settings[key] = checked(f"policy.{key}", value, hints[key])
    try:
        return kind(**settings)
    except (ValueError, TypeError) as error:
        raise BadInput(f"policy.{error}") from None


def hints_of(kind: type[Policy]) -> dict[str, Any]:
    """Return the types of a policy's fields, looked up once: a sweep builds thousands of policies."""
    if kind not in HINTS:
        HINTS[kind] = get_type_hints(kind)
    return HINTS[kind]


def checked(key: str, value: Any, hint: Any) -> Any:
    """Return a value as the type a field has, or complain."""
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
    """Return the trailing comment of every field: that comment is its help."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, Policy):
            try:
                source = inspect.getsource(base)
            except (OSError, TypeError):
                continue
            for match in re.finditer(r"^    (\w+): [^#\n]+?  # (.+)$", source, re.MULTILINE):
                found[match[1]] = match[2]
    return found


def presets() -> dict[str, Path]:
    """Return the presets that come with the package."""
    folder = Path(str(files("servesim.policies.presets")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def preset(name: str) -> dict[str, Any]:
    """Return a preset's part of a scenario."""
    from servesim.files.yaml_reader import read_yaml

    path = presets().get(name)
    if path is None:
        hint = f"; {name} is a policy: --policy {name}" if name in POLICIES else meant(name, presets())
        raise BadInput(f"preset {name!r}: no such preset; known: {', '.join(presets())}{hint}")
    tree: dict[str, Any] = read_yaml(path)
    return tree


def about_preset(name: str) -> Optional[str]:
    """Return the comment a preset begins with."""
    lines = presets()[name].read_text(encoding="utf-8").splitlines()
    return " ".join(line.lstrip("# ") for line in lines if line.startswith("#")) or None

"""Python files of users: the permission to load them, their loading, and the position of their errors.

A scenario can name a policy as FILE.py:NAME, and loading that file executes it. So reading a scenario or a folder loads
no file. A file is loaded only inside `allow_code`, and only if it is in the working folder or the user trusts it.

`require_access` decides for all code that a scenario names: files, and the classes of an installed engine.
"""

from __future__ import annotations

import os
import sys
import traceback
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Optional

from servesim.core import BadInput, PlanError, Policy, PolicyError, Stuck
from servesim.files.read import quote, read_text, show_path

PREFIX = "servesim_user_"  # module names of user files
MAX_BYTES = 2**22  # of a user file
MAX_MESSAGE = 300  # characters of an exception's text
DOES_NOT_RUN = "not loaded: this command reads scenarios and runs none"
NOT_NAMED = "the page executes only code that its scenario file names; name it there and run `sim explore FILE`"


class CodeAccess(NamedTuple):
    """Permission to load user files. Worker processes get it with their tasks."""

    folder: str  # working folder of the command; relative names start here
    trust: bool = False  # files outside the folder too
    only: Optional[Sequence[str]] = None  # names that may be loaded; None: all


_access: ContextVar[Optional[CodeAccess]] = ContextVar("servesim_code_access", default=None)


def code_access() -> Optional[CodeAccess]:
    """Return the current permission; None: no user file may be loaded."""
    return _access.get()


@contextmanager
def use_access(access: Optional[Sequence[Any]]) -> Iterator[None]:
    """Use a permission (as JSON, or None) until the block ends."""
    token = _access.set(None if access is None else CodeAccess(*access))
    try:
        yield
    finally:
        _access.reset(token)


@contextmanager
def allow_code(trust: bool = False) -> Iterator[None]:
    """Allow user files of the working folder until the block ends; with `trust`, files of all folders."""
    try:
        folder = os.getcwd()
    except OSError:  # the working folder was removed, so no file is in it
        folder = os.devnull
    with use_access((folder, trust)):
        yield


def names_file(name: Any) -> bool:
    """Whether a policy name is a Python file, FILE.py:NAME or FILE.py."""
    return isinstance(name, str) and (".py:" in name or name.endswith(".py"))


def require_access(name: str, texts: Iterable[str]) -> CodeAccess:
    """Return the permission to execute code that these texts name; raise BadInput if there is none."""
    access = _access.get()
    if access is None:
        raise BadInput(f"policy {show_path(name)}: {DOES_NOT_RUN}")
    if access.only is not None and not set(texts) <= set(access.only):
        raise BadInput(f"policy {show_path(name)}: {NOT_NAMED}")
    return access


def find_file(path: str, name: str) -> Path:
    """Return a user file if it may be executed."""
    access = require_access(name, [name])
    try:
        file, folder = Path(access.folder, path).resolve(), Path(access.folder).resolve()
        if not file.is_file():
            raise BadInput(f"policy {show_path(name)}: {show_path(path)}: no such file")
    except (OSError, ValueError, RuntimeError) as error:  # a name that is too long, a NUL, a loop of links
        if isinstance(error, BadInput):
            raise
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"policy {show_path(name)}: cannot be read: {reason}") from None
    if not access.trust and folder not in file.parents:
        raise BadInput(
            f"policy {show_path(name)}: {file} is outside the working folder; it is code that would be executed: "
            "if you trust it, use --trust (in Python: trust=True)"
        )
    return file


def load_file(path: str, name: str) -> ModuleType:
    """Load a user file if that is allowed. This is the only place that executes code of a user file here."""
    file = find_file(path, name)
    try:
        return load_module(file, read_text(file, MAX_BYTES))
    except BadInput as bad:
        raise BadInput(f"policy {show_path(name)}: {bad}") from None


@lru_cache(maxsize=64)
def load_module(file: Path, source: str) -> ModuleType:
    """Return a file as a module, built from its current text: Python's cache compares whole seconds only."""
    path = str(file)
    number = zlib.crc32(path.encode("utf-8", "surrogatepass"))  # two files of the same name are two modules
    module = ModuleType(f"{PREFIX}{file.stem}_{number:08x}")
    module.__file__ = path
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        place = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else user_line(error) or path
        raise BadInput(f"does not load: {place}: {error_text(error)}") from None
    return module


def error_text(error: BaseException) -> str:
    """Return the type and the message of an error on one short line; of a failed check only the message."""
    try:
        text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    except Exception:  # __str__ of a user's exception
        text = ""
    text = text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."
    if text and isinstance(error, AssertionError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_user_class(kind: type[Any]) -> bool:
    """Whether a class comes from a user file."""
    return kind.__module__.startswith(PREFIX)


def user_line(error: BaseException) -> Optional[str]:
    """Return FILE:LINE of the user file that raised an error, or None."""
    result = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__", "")).startswith(PREFIX):
            result = f"{frame.f_code.co_filename}:{line}"
    return result


def class_line(kind: type[Any], method: str = "") -> str:
    """Return FILE:LINE of a user's class, or of one of its methods."""
    code = getattr(vars(kind).get(method), "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    file = str(getattr(sys.modules.get(kind.__module__), "__file__", kind.__module__))
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return file
    number = next((n for n, line in enumerate(lines, 1) if line.lstrip().startswith(f"class {kind.__name__}")), None)
    return file if number is None else f"{file}:{number}"


def describe_error(error: BaseException, policy: Optional[object] = None) -> Optional[str]:
    """Return an error that a user's policy or router raised or caused, as one line with FILE:LINE; None: others."""
    cause: Optional[BaseException] = error
    while cause is not None:  # SimPy raises a copy of the error from the original
        line = user_line(cause)
        if line is not None:
            return f"{line}: {error_text(cause)}"
        cause = cause.__cause__ or cause.__context__
    if policy is None or not is_user_class(type(policy)):
        return None
    kind = type(policy)
    if isinstance(error, PlanError):
        return f"{class_line(kind, 'decide')}: decide returned {quote(error.plan)}, expected a Plan"
    place = class_line(kind, "decide" if isinstance(policy, Policy) else "choices")
    return f"{place}: the engine cannot use a result of {kind.__name__}: {error_text(error)}"


@contextmanager
def user_errors(policy: object) -> Iterator[None]:
    """Turn an error that a user's policy or router raises or causes into a PolicyError."""
    try:
        yield
    except (BadInput, Stuck, PolicyError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        message = describe_error(error, policy)
        if message is None:
            raise
        raise PolicyError(message) from error

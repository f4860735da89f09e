"""Only known modules execute code from files: a new place must ask `servesim.config.user_code`, and is named here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import ROOT

# Calls that execute code from files, or that can: by the last part of their names.
EXECUTING = {
    "exec", "eval", "compile", "__import__", "exec_module", "load_module", "spec_from_file_location",
    "SourceFileLoader", "run_path", "run_module", "import_module", "Unpickler", "load_library",
}  # fmt: skip
LOADERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "torch", "yaml"}
KNOWN = {
    "sim/config/user_code.py": {"exec", "compile", "load_module"},  # after `require_access`
    "calibrate/engines/vllm.py": {"spec_from_file_location", "exec_module"},  # in the worker; `find_file` gave the name
    "calibrate/adapter/__main__.py": {"run_path"},  # the script of the command line
    "calibrate/device/worker.py": {"spec_from_file_location", "import_module"},  # packages of servesim; JOBS, BACKENDS
    "calibrate/adapter/vllm_recorder.py": {"import_module"},  # modules of the vLLM that runs
    "calibrate/adapter/vllm_scheduler.py": {"import_module"},  # the same
    "sim/config/families.py": {"import_module"},  # FAMILIES
    "sim/core/class_table.py": {"import_module"},  # FAMILIES, ROUTERS
    "traces/read/tokens.py": {"import_module"},  # tokenizers, sentencepiece
    "sim/core/fields.py": {"eval"},  # annotations of a class that is loaded
    "sim/files/yaml_reader.py": {"pickle.loads", "yaml.load"},  # its own bytes; Reader, which makes no objects
}


def calls_in(file: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of a file with the names of their functions."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def is_own_module(call: ast.Call) -> bool:
    """Whether an import names a module in the sources: as a text, or one whose beginning is a text."""
    name = call.args[0]
    first = name.values[0] if isinstance(name, ast.JoinedStr) else name
    return isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value[:1] not in ("", "/")


def executing_calls(file: Path) -> set[str]:
    """Return the calls of a file that may execute code from files."""
    found = set()
    for name, call in calls_in(file):
        last, module = name.rpartition(".")[2], name.rpartition(".")[0].rpartition(".")[2]
        if last in EXECUTING and not (last == "compile" and module == "re"):
            found |= set() if last == "import_module" and is_own_module(call) else {last}
        elif module in LOADERS and last in ("load", "loads", "load_all", "unsafe_load", "full_load", "open"):
            found |= {f"{module}.{last}"}
        found |= {"allow_pickle"} & {keyword.arg for keyword in call.keywords}
    return found


@pytest.mark.parametrize("folder", ["sim", "policies", "routers", "calibrate", "traces"])
def test_only_known_modules_execute_code_from_files(folder: str) -> None:
    files = {str(file.relative_to(ROOT)): file for file in (ROOT / folder).rglob("*.py")}
    found = {name: calls for name, file in files.items() if (calls := executing_calls(file))}
    assert found == {name: calls for name, calls in KNOWN.items() if name in files}


def test_every_loaded_file_has_the_permission_of_require_access() -> None:
    """In the module that executes files, no other function reads the permission, and only `load_file` executes."""
    tree = ast.parse((ROOT / "sim/config/user_code.py").read_text(encoding="utf-8"))
    callers: dict[str, set[str]] = {}
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    callers.setdefault(ast.unparse(node.func), set()).add(function.name)
    assert callers["exec"] == {"load_module"}
    assert callers["load_module"] == {"load_file"} and "find_file" in callers
    assert callers["find_file"] == {"load_file"} and callers["require_access"] == {"find_file"}

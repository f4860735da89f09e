"""The folders of policies: each engine family can be removed, by its folder and one entry of a table."""

from __future__ import annotations

import ast
import compileall
import json
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from servesim.policies import FAMILIES

from ..conftest import ROOT
from ..layers import PACKAGES, graph

EXTENDS = {"vllm_ascend": {"vllm_v1"}}  # families whose policies are subclasses of another family
# Modules outside the folders that import a family: tools for the engine of this family.
TOOLS = {
    "servesim.calibrate.adapter.vllm_scheduler": {"vllm_v1"},
    "servesim.calibrate.vllm.recording": {"vllm_v1"},
}
SCENARIO = """\
workload: {requests: 5, arrivals: {kind: burst}, lengths: {prompt: 40, output: 4}}
policy: NAME
engine: {num_blocks: 100, block_size: 16}
profile: {base: 0.01}
"""


def family_of(module: str) -> str | None:
    """Return the family in whose folder a module is."""
    parts = module.split(".")
    return parts[2] if parts[1:2] == ["policies"] and len(parts) > 2 and parts[2] in FAMILIES else None


def test_every_folder_is_a_family() -> None:
    folders = {path.parent.name for path in (ROOT / "policies").glob("*/__init__.py")}
    assert folders == set(FAMILIES)


def test_a_family_is_imported_by_subclasses_and_by_tools_of_its_engine_only() -> None:
    found: dict[str, set[str]] = {}
    for module, others in graph(ROOT).items():
        own = family_of(module)
        used = {family for other in others if (family := family_of(other)) is not None and family != own}
        if used:
            found.setdefault(own or module, set()).update(used)
    assert found == EXTENDS | TOOLS


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_removed_with_its_folder_and_its_entry(family: str, library: Path, tmp_path: Path) -> None:
    removed = {family, *(name for name, bases in EXTENDS.items() if family in bases)}
    package = copy_without(removed, library, tmp_path)
    policy, server = ("sglang", "sglang") if "vllm_v1" in removed else ("vllm-v1", "vllm")
    (tmp_path / "scenario.yaml").write_text(SCENARIO.replace("NAME", policy))
    commands = ["policies list", "run scenario.yaml", f"export scenario.yaml --to {server}"]
    file, codes, policies, presets, targets = in_copy(tmp_path, commands)
    left = {name: family for name, family in FAMILIES.items() if name not in removed}
    assert (Path(file).parent, codes) == (package, [0, 0, 0])
    assert policies == [name for family in left.values() for name in family.policies]
    assert set(presets) == {path.stem for family in left for path in (ROOT / "policies" / family).rglob("*.yaml")}
    assert set(targets) == {family.server for family in left.values()} - {None}


def in_copy(folder: Path, commands: list[str]) -> Any:
    """Run commands of the copy of the library in a folder; return their codes and what this library has.

    A fork of this process has the other packages already, which take longer to import than the commands.
    """
    ended, began = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.chdir(folder)
            sys.path.insert(0, str(folder))
            for name in [name for name in sys.modules if name.partition(".")[0] == "servesim"]:
                del sys.modules[name]
            main = import_module("servesim.cli").main
            codes = [main(words.split()) for words in commands]
            tables = [import_module(f"servesim.{name}") for name in ("policies", "config.registry", "config.export")]
            names = [list(tables[0].POLICIES), list(tables[1].presets()), list(tables[2].TARGETS)]
            os.write(began, json.dumps([import_module("servesim").__file__, codes, *names]).encode())
        finally:
            os._exit(0)
    os.close(began)
    with open(ended) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the library in plain Python, with its byte code."""
    folder = tmp_path_factory.mktemp("library")
    for top, name in PACKAGES.items():
        shutil.copytree(
            ROOT / top, folder / name.replace(".", "/"), ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    assert compileall.compile_dir(folder, quiet=1)
    return folder


def copy_without(removed: set[str], library: Path, folder: Path) -> Path:
    """Copy the library without the folders of some families and their entries in the table; return the package."""
    package = shutil.copytree(library / "servesim", folder / "servesim")
    table = package / "policies" / "__init__.py"
    text = table.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    for family in removed:
        shutil.rmtree(package / "policies" / family)
        first, last = lines_of_entry(text, family)
        lines[first - 1 : last] = [""] * (last - first + 1)
    table.write_text("".join(lines), encoding="utf-8")
    return package


def lines_of_entry(text: str, family: str) -> tuple[int, int]:
    """Return the numbers of the first and the last line of the entry of a family in FAMILIES."""
    dicts = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Dict))
    [found] = [
        (key.lineno, value.end_lineno or 0)
        for node in dicts
        for key, value in zip(node.keys, node.values)
        if isinstance(key, ast.Constant) and key.value == family and isinstance(value, ast.Call)
    ]
    return found

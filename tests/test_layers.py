"""The shape of the project: who may import whom, what is packaged, how fast the command answers."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import ROOT

pytestmark = pytest.mark.live

BASE = {"core", "line", "cohort", "inbox", "limits", "step", "server", "driver", "shape"}
STANDARD = set(sys.stdlib_module_names)


def imports(path: Path) -> list[tuple[int, str]]:
    """Return (relative level, module) of every import in a file, TYPE_CHECKING blocks left out."""
    found = []
    skipped: set[ast.AST] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped |= {inner for statement in node.body for inner in ast.walk(statement)}
        if node in skipped:
            continue
        if isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or ""))
        elif isinstance(node, ast.Import):
            found += [(0, alias.name) for alias in node.names]
    return found


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("name", sorted(BASE))
def test_the_base_imports_only_itself_and_the_standard_library(name: str) -> None:
    for level, module in imports(ROOT / "sim" / f"{name}.py"):
        root = module.split(".")[0]
        assert (level == 1 and root in BASE) or (level == 0 and root in STANDARD), f"{name} imports {module}"


@pytest.mark.parametrize("path", sources("policies"), ids=lambda path: path.stem)
def test_policies_import_only_the_vocabulary_and_each_other(path: Path) -> None:
    for level, module in imports(path):
        root = module.split(".")[0]
        fine = level == 1 or (level == 2 and root in BASE) or (level == 0 and root in STANDARD)
        assert fine, f"{path.name} imports {module}"


@pytest.mark.parametrize(
    ("module", "homes"), [("simpy", {"engine"}), ("mindspore", {"kbk"}), ("mindformers", {"kbk"}), ("torch", {"gpu"})]
)
def test_a_heavy_library_is_imported_in_one_place(module: str, homes: set[str]) -> None:
    for path in sources("sim", "policies", "calibrate", "traces"):
        uses = any(level == 0 and name.split(".")[0] == module for level, name in imports(path))
        at_home = any(path.stem.startswith(home) for home in homes) or path.stem == "results"  # its version only
        assert not uses or at_home, f"{path.name} imports {module}"


def test_no_policy_reads_what_a_request_will_write() -> None:
    for path in sources("policies"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("output", "end", "fails"), f"{path.name}:{node.lineno} reads .{node.attr}"


def test_setup_cfg_lists_every_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    names = {"sim": "servesim", "policies": "servesim.policies", "calibrate": "servesim.calibrate",
             "traces": "servesim.traces"}  # fmt: skip
    for folder, package in names.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inner = init.parent.relative_to(ROOT / folder).parts
            assert ".".join([package, *inner]) in listed


def test_every_module_says_in_its_first_line_what_it_is_for() -> None:
    for path in sources("sim", "policies", "calibrate", "traces", "tests", "benchmarks"):
        first = path.read_text(encoding="utf-8").splitlines()[:1]
        assert first and first[0].startswith('"""'), f"{path} has no first line"


def test_the_checkout_cannot_be_imported_by_its_folder_names() -> None:
    found = subprocess.run([sys.executable, "-c", "import sim"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "import servesim, not sim" in found.stderr


def test_help_answers_in_under_three_tenths_of_a_second() -> None:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "servesim", "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3


def test_the_base_and_the_policies_load_on_an_old_python() -> None:
    """llm-serving's hosts have Python 3.9: no newer syntax in what they load."""
    names = [ROOT / "sim" / f"{name}.py" for name in BASE] + sources("policies")
    for path in names:
        ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))

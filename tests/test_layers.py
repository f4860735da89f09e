"""The structure of the project: import directions, cycles, packaging, Python 3.9 compatibility, start-up time."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from servesim.policies import FAMILIES

from .conftest import ROOT
from .layers import PACKAGES, cycles, graph, imported_names, modules, violations

# Every unit (a folder, or a module at the top of a folder) and the units that it may import; see docs/structure.md.
BASE = {"core", "files"}
TRACES = {"traces", "traces.read", "traces.make"}
CONFIG = BASE | TRACES | {"engine", "costs", "policies", "routers", "config"}
RUNS = CONFIG | {"runs", "version"}
STUDY = RUNS | {"statistics", "study"}
LIVE = STUDY | {"calibrate.device", "calibrate.probe", "calibrate.client", "calibrate.live"}
REPLAY = LIVE | {"calibrate.replay"}
CALIBRATE = REPLAY | {
    f"calibrate.{name}" for name in ("endpoint", "engines", "imports", "logs", "server", "tune", "vllm")
}
RESULTS = STUDY | {"report"}
# What a folder of policies holds beside the policies. It imports `config`, which loads it by name.
FAMILY_CONFIG = {
    "policies.vllm_flags",
    *(f"policies.{family}.{name}" for family in FAMILIES for name in ("config_file", "export", "tuning")),
}
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "files": {"core"},
    "routers": {"core"},
    "engine": {"core", "routers"},
    "policies": {"core", "engine"},
    **dict.fromkeys(FAMILY_CONFIG, BASE | FAMILY_CONFIG | {"policies", "engine", "costs", "config"}),
    "costs": BASE,
    "traces": BASE | {"engine"},
    "traces.read": BASE | {"traces"},
    "traces.make": BASE | {"traces", "traces.read"},
    "config": CONFIG,
    "runs": RUNS,
    "statistics": RUNS,
    "study": STUDY,
    "report": STUDY,
    "testing": RUNS,
    "calibrate.adapter": {"core", "engine", "policies"},
    "calibrate.client": {"core", "routers"},
    "calibrate.device": BASE | {"costs"},
    "calibrate.device.kbk": BASE | {"calibrate.device"},
    "calibrate.device.torch": BASE | {"calibrate.device"},
    "calibrate.probe": STUDY | {"calibrate.device"},
    "calibrate.live": LIVE,
    "calibrate.replay": REPLAY,
    "calibrate.server": REPLAY | {"web"},
    "calibrate.endpoint": REPLAY,
    "calibrate.logs": STUDY,
    "calibrate.engines": STUDY | {"calibrate.device"},
    "calibrate.imports": STUDY | {"calibrate.device", "calibrate.probe"},
    "calibrate.tune": REPLAY | {"calibrate.logs", "calibrate.tune"},
    "calibrate.vllm": REPLAY | {"calibrate.imports", "calibrate.adapter"},
    "frames": REPLAY | RESULTS,
    "explorer": RESULTS | {"web"},
    "api": REPLAY | RESULTS | {"explorer", "frames"},
    "commands": CALIBRATE | RESULTS | {"explorer", "frames", "testing", "api", "web"},
    "version": set(),
    "web": {"core"},
    "cli": {"core", "files", "config", "commands", "version"},
    "": {"api", "version"},
    "__main__": {"cli"},
}
# Modules that run inside a server or on a device host: Python 3.9, from a plain copy of the folders.
ON_HOSTS = (
    "calibrate.adapter.llm_serving", "calibrate.adapter.vllm_recorder", "calibrate.adapter.vllm_scheduler",
    "calibrate.device.standalone", "calibrate.device.worker", "calibrate.device.fake", "calibrate.engines.driver",
    "calibrate.probe.measure", "calibrate.live.replay_job", "calibrate.server.engine_process",
    *(f"policies.{family}" for family in FAMILIES),
    *(f"routers.{path.stem}" for path in (ROOT / "routers").glob("[a-z]*.py")),
)  # fmt: skip
ENGINE_NAMES = re.compile(
    r"vllm|sglang|mindie|llm.?serving|lightllm|mindspore|sarathi|splitfuse|fastgen|fastertransformer|fastserve"
    r"|\b(orca|ascend|vidur)\b",
    re.IGNORECASE,
)
STDLIB = set(sys.stdlib_module_names)


def test_imports_point_in_the_documented_directions() -> None:
    assert violations(graph(ROOT), ALLOWED) == []


def test_no_import_cycles() -> None:
    assert cycles(graph(ROOT)) == []


@pytest.mark.parametrize(
    ("file", "text", "violation"),
    [
        ("sim/engine/x.py", "from servesim.runs.metrics import row", "servesim.engine.x imports servesim.runs.metrics"),
        ("sim/core/x.py", "def f():\n    import servesim.engine.step", "servesim.core.x imports servesim.engine.step"),
        ("sim/api.py", "from servesim.commands import sweep", "servesim.api imports servesim.commands.sweep"),
        (
            "policies/x.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from servesim.runs.metrics import Metrics",
            "servesim.policies.x imports servesim.runs.metrics",
        ),
        (
            "policies/sglang/policy.py",
            "from servesim.config.exported import Exported",
            "servesim.policies.sglang.policy imports servesim.config.exported",
        ),
        (
            "sim/config/x.py",
            "from servesim.policies.sglang import export",
            "servesim.config.x imports servesim.policies.sglang.export",
        ),
        (
            "calibrate/probe/x.py",
            "from ..live import driver",
            "servesim.calibrate.probe.x imports servesim.calibrate.live",
        ),
    ],
)  # fmt: skip
def test_a_violation_is_found_anywhere_in_a_module(tmp_path: Path, file: str, text: str, violation: str) -> None:
    for path in modules(ROOT).values():  # empty files: only the import under test counts
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.touch()
    (tmp_path / file).write_text(text, encoding="utf-8")
    assert violation in violations(graph(tmp_path), ALLOWED)


def test_a_cycle_through_a_function_and_a_type_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]


def test_core_and_engine_name_no_engine() -> None:
    files = [path for folder in ("core", "engine") for path in sorted((ROOT / "sim" / folder).glob("*.py"))]
    assert not [path for path in files if ENGINE_NAMES.search(path.read_text(encoding="utf-8"))]


def test_only_commands_use_argparse() -> None:
    for name, path in modules(ROOT).items():
        if name.startswith("servesim.commands") or name in ("servesim.cli", "servesim.calibrate.device.standalone"):
            continue
        imports = {module.split(".")[0] for module in imported_names(name, path)}
        assert "argparse" not in imports or name == "servesim.calibrate.device.worker", name


@pytest.mark.parametrize(
    ("module", "home"),
    [
        ("simpy", "servesim.engine"),
        ("mindspore", "servesim.calibrate.device.kbk"),
        ("mindformers", "servesim.calibrate.device.kbk"),
        ("torch", "servesim.calibrate.device.torch"),
        ("triton", "servesim.calibrate.device.torch"),
    ],
)
def test_a_heavy_library_is_imported_in_one_package_only(module: str, home: str) -> None:
    for name, path in modules(ROOT).items():
        if module == "simpy" and name == "servesim.runs.run_folder":  # its version only
            continue
        uses = any(other.split(".")[0] == module for other in imported_names(name, path))
        assert not uses or name.startswith(home), f"{name} imports {module}"


def host_modules() -> set[str]:
    """Return the modules that hosts load, directly and indirectly, packages included."""
    known = graph(ROOT, eager=True)
    result: set[str] = set()
    pending = [f"servesim.{name}" for name in ON_HOSTS]
    while pending:
        name = pending.pop()
        if name not in result:
            result.add(name)
            pending += [*known[name], *([name.rpartition(".")[0]] if "." in name else [])]
    return result


def test_host_modules_need_the_standard_library_only() -> None:
    known = modules(ROOT)
    for name in sorted(host_modules()):
        imports = {other.split(".")[0] for other in imported_names(name, known[name], eager=True)}
        assert imports <= STDLIB | {"servesim"}, f"{name} imports {imports - STDLIB}"


def test_host_modules_are_python_3_9() -> None:
    known = modules(ROOT)
    for name in host_modules():
        ast.parse(known[name].read_text(encoding="utf-8"), feature_version=(3, 9))


def test_no_policy_reads_the_true_output_length() -> None:
    for name, path in modules(ROOT).items():
        if not name.startswith("servesim.policies") or name.rpartition(".")[2].startswith("radix_"):
            continue  # the parts of a radix cache have an end, too
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                place = f"{path.name}:{node.lineno}"
                assert node.attr not in ("output", "end", "fails_at_token"), f"{place} reads .{node.attr}"


def test_no_module_has_more_than_400_lines() -> None:
    for path in modules(ROOT).values():
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, path


def test_no_function_has_more_than_50_lines() -> None:
    """It fits on one screen, also in the tools and the benchmarks."""
    files = [path for top in (*PACKAGES, "tools", "benchmarks") for path in (ROOT / top).rglob("*.py")]
    too_long = [
        f"{path.relative_to(ROOT)}: {node.name} has {length} lines"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (length := (node.end_lineno or 0) - node.lineno + 1) > 50
    ]
    assert len(files) > 300 and not too_long, too_long


def test_every_module_starts_with_a_docstring() -> None:
    sources = [path for folder in (*PACKAGES, "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    for path in sources:
        first = path.read_text(encoding="utf-8").splitlines()[:1]
        assert first and first[0].startswith('"""'), f"{path} has no first line"


def test_the_checkout_cannot_be_imported_under_its_folder_names() -> None:
    result = subprocess.run([sys.executable, "-c", "import sim"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "import servesim, not sim" in result.stderr


def test_help_loads_no_large_package_and_few_modules() -> None:
    code = "import atexit, sys; bare = set(sys.modules)"
    code += "; atexit.register(lambda: print(*(set(sys.modules) - bare), file=sys.stderr))"
    code += "; from servesim.cli import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    large = {"numpy", "scipy", "pandas", "matplotlib", "pydantic", "yaml", "simpy", "asyncio", "aiohttp", "optuna"}
    assert "argparse" in done.stderr.split()
    assert not large & set(done.stderr.split())
    assert len(done.stderr.split()) < 140  # 1 to 2 ms each


@pytest.mark.live
def test_help_takes_less_than_twice_the_cpu_time_of_some_imports_of_the_standard_library() -> None:
    """It is 0.9 times, on a busy machine too."""
    ratios = []
    for _ in range(5):
        imports = cpu_seconds("-c", "import asyncio, http.server, unittest")
        ratios.append(cpu_seconds("-m", "servesim", "--help") / imports)
    assert min(ratios) < 2, ratios


def cpu_seconds(*words: str) -> float:
    """Return the CPU seconds of a Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

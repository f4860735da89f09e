"""Plant small faults, one at a time, and record which ones the tests find: python tools/plant_faults.py STEP FOLDER

Steps, in this order; FOLDER keeps copies of the sources and what was found, and an interrupted step goes on:
  choose    write FOLDER/faults.csv: --count faults of core, engine, policies, runs, study and costs by --seed
            (copy faults.csv from another FOLDER instead, to plant the same faults in sources that changed since)
  cover     run the tests once and record which functions each test calls and how long it takes
  run       plant each fault and run the tests that call its function, quickest first, until one fails
  table     write the table as Markdown to --output

Everything runs in plain Python, in one process at a time. Times are CPU seconds, so other work on the machine does not
matter. Tests that `make test` leaves out, that start other programs, or that fail without a fault are not used.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import csv
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from faults import Fault, Place, choose, find_again, planted, sources

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("sim/core", "sim/engine", "policies", "sim/runs", "sim/study", "sim/costs")
PARTS = {"sim": "", "policies": "policies", "routers": "routers", "calibrate": "calibrate", "traces": "traces"}
TESTS = (
    "engine",
    "costs",
    "runs",
    "policies",
    "study",
    "commands",
    "config",
    "statistics",
    ".",
    "report",
    "traces",
    "files",
)
MARKS = "not slow and not kbk and not live and not ascend"
LONGEST = 4.0  # CPU seconds of one test while functions are recorded; a longer one is not used
BUDGET = 40.0  # CPU seconds of the tests of one fault
OF_EACH_FILE = 3  # the quickest tests of each file come first, so that a fault meets tests of several kinds
INTRODUCTION = """\
# Planted faults

Small faults in the sources, planted one at a time by `tools/plant_faults.py`, and the test file that found each first.
The tool runs the quickest tests that call the faulty function, in plain Python, up to a limit of CPU time. `make test`
runs all tests, so it may find more. Calls in other processes are not recorded. `planted_faults.csv` has the faults.
"""
HITS: set[int] = builtins.__dict__.setdefault("_HITS", set())


def copy_package(root: Path, target: Path) -> None:
    """Write the package `servesim` from a checkout."""
    shutil.rmtree(target, ignore_errors=True)
    for part, inside in PARTS.items():
        shutil.copytree(root / part, target / "servesim" / inside, dirs_exist_ok=True,
                        ignore=shutil.ignore_patterns("__pycache__", "*.so"))  # fmt: skip


def in_package(package: Path, module: str) -> Path:
    """Return the file of a module (path in the repository) in a copied package."""
    top, _, rest = module.partition("/")
    return package / "servesim" / PARTS[top] / rest


def instrumented(text: str, module: str, names: list[str]) -> str:
    """Return the text of a module whose functions record that they were called; `names` gets their names."""
    inserts: list[tuple[int, str]] = []

    def walk(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = f"{name}.{child.name}".lstrip(".") if hasattr(child, "name") and hasattr(child, "body") else name
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = child.body[1:] if ast.get_docstring(child) and len(child.body) > 1 else child.body
                line = min([body[0].lineno, *(each.lineno for each in getattr(body[0], "decorator_list", []))])
                if line > child.lineno:
                    inserts.append((line - 1, f"{' ' * body[0].col_offset}_HITS.add({len(names)})\n"))
                    names.append(f"{module}:{inner}")
            walk(child, inner)

    tree = ast.parse(text)
    walk(tree, "")
    future = [node.lineno for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    if not future:
        return text
    header = "import builtins as _b; _HITS = _b.__dict__.setdefault('_HITS', set())\n"
    lines = text.splitlines(keepends=True)
    for at, line in sorted([*inserts, (future[0], header)], reverse=True):
        lines.insert(at, line)
    return "".join(lines)


class TooLong(BaseException):
    """A test took too much CPU time. Hypothesis does not try to shrink it, because it is no Exception."""


class Watch:
    """Pytest plugin: runs chosen tests in a given order, and records outcome, CPU seconds and called functions."""

    def __init__(self, limits: dict[str, float], budget: float, default: float = LONGEST) -> None:
        self.limits, self.budget, self.default = limits, budget, default
        self.tests: dict[str, tuple[bool, float, list[int]]] = {}
        self.failed = self.reason = ""
        signal.signal(signal.SIGPROF, self.too_long)

    @staticmethod
    def too_long(*_: Any) -> None:
        raise TooLong

    def pytest_collection(self) -> None:
        from hypothesis import Phase, settings  # here, because it is a plugin of pytest

        settings.register_profile("faults", phases=(Phase.explicit, Phase.generate), database=None)
        settings.load_profile("faults")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.limits:
            items[:] = sorted((i for i in items if i.nodeid in self.limits), key=lambda i: self.limits[i.nodeid])
        else:
            random.Random(0).shuffle(items)  # a file that takes too long is represented by some of its tests

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        HITS.clear()
        start, self.ok = cpu(), True
        allowed = max(15.0, 4 * self.limits[item.nodeid]) if item.nodeid in self.limits else self.default
        signal.setitimer(signal.ITIMER_PROF, allowed)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.tests[item.nodeid] = (self.ok, round(cpu() - start, 3), sorted(HITS))
            if cpu() > self.budget:
                item.session.shouldstop = "out of time"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or report.skipped:
            self.ok = False
        if report.failed and not self.failed:
            self.failed, self.reason = report.nodeid, str(report.longrepr).strip().splitlines()[-1][:150]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed, self.reason = report.nodeid, "cannot be imported"


def cpu() -> float:
    """Return the CPU seconds of this process and of the ended processes that it started."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def no_process(*_: Any, **__: Any) -> None:
    raise OSError("calls in other processes are not recorded")


def run_tests(folder: Path, package: Path, files: list[str], limits: dict[str, float], budget: float) -> dict[str, Any]:
    """Run tests in a forked process, which has the large libraries already, and return what the plugin recorded."""
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.chdir(folder / "tree")
        with open(folder / "pytest.log", "w", encoding="utf-8") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        for name in ("TMPDIR", "HYPOTHESIS_STORAGE_DIRECTORY"):
            os.environ[name] = str(folder / "tmp")
        os.environ["PYTHONPATH"] = str(package)
        sys.path.insert(0, str(package))
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
        subprocess.Popen.__init__ = no_process  # type: ignore[method-assign]
        watch = Watch(limits, cpu() + budget)
        options = ["-q", "-p", "no:cacheprovider", "--timeout=0", "-p", "no:xdist", "--hypothesis-seed=0", "-m", MARKS]
        options += ["--tb=line", "-o", "addopts=--import-mode=importlib", *(["-x"] if limits else [])]
        pytest.main([*options, *files], plugins=[watch])
        answer.write_text(json.dumps({**vars(watch), "cpu": cpu()}, default=str), encoding="utf-8")
        os._exit(0)
    end = time.monotonic() + 1800
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(folder / "tmp", ignore_errors=True)
    (folder / "tmp").mkdir()
    if not answer.exists():
        return {"failed": "(the process of the tests)", "reason": "was killed", "tests": {}, "cpu": 0}
    return json.loads(answer.read_text(encoding="utf-8"))


def prepare(folder: Path, root: Path) -> None:
    """Copy the tracked files, the plain package and a package that records called functions."""
    if (folder / "functions.json").exists():
        return
    shutil.rmtree(folder / "tree", ignore_errors=True)
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    tracked = subprocess.run(["git", "ls-files"], cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout
    for name in tracked.splitlines():
        (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, folder / "tree" / name)
    names: list[str] = []
    for package in ("plain", "hits"):
        copy_package(folder / "tree", folder / package)
    for module, text in sources(folder / "tree", FOLDERS).items():
        in_package(folder / "hits", module).write_text(instrumented(text, module, names), encoding="utf-8")
    (folder / "functions.json").write_text(json.dumps(names), encoding="utf-8")


def read_lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def add_line(file: Path, value: Any) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(value) + "\n")


def cover(folder: Path, seconds: float) -> None:
    """Run each test file once with the package that records called functions."""
    done = {each["file"] for each in read_lines(folder / "cover.jsonl")}
    files = [file for part in TESTS for file in sorted((folder / "tree/tests" / part).glob("test_*.py"))]
    for file in files:
        name = file.relative_to(folder / "tree").as_posix()
        if name not in done:
            answer = run_tests(folder, folder / "hits", [name], {}, seconds)
            add_line(folder / "cover.jsonl", {"file": name, "tests": answer["tests"]})
            print(name, len(answer["tests"]), round(answer["cpu"], 1), flush=True)


def tests_of_functions(folder: Path) -> tuple[dict[str, set[str]], dict[str, float]]:
    """Return the passing tests that call each function (and each module), and the seconds of each test."""
    names = json.loads((folder / "functions.json").read_text(encoding="utf-8"))
    callers: dict[str, set[str]] = defaultdict(set)
    seconds: dict[str, float] = {}
    for each in read_lines(folder / "cover.jsonl"):
        for test, (ok, took, hits) in each["tests"].items():
            if ok:
                seconds[test] = took
                for hit in hits:
                    callers[names[hit]].add(test)
                    callers[names[hit].partition(":")[0]].add(test)
    return callers, seconds


def chosen_tests(tests: set[str], seconds: dict[str, float], budget: float) -> dict[str, float]:
    """Return the tests for a fault: the quickest of each file, then the quickest, as long as the time lasts."""
    ordered = sorted(tests, key=lambda test: (seconds[test], test))
    rank: dict[str, int] = defaultdict(int)
    chosen: list[tuple[bool, float, str]] = []
    for test in ordered:
        file = test.partition("::")[0]
        rank[file] += 1
        chosen.append((rank[file] > OF_EACH_FILE, seconds[test], test))
    kept, total = {}, 0.0
    for _, took, test in sorted(chosen):
        total += took
        if total > budget:
            break
        kept[test] = took
    return kept


def first_tests(module: str, tests: dict[str, float]) -> dict[str, float]:
    """Return the quickest tests of a few files in the test folder of a module: most faults are found there."""
    home = f"tests/{next(name for name in FOLDERS if module.startswith(name)).rpartition('/')[2]}/"
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests if test.startswith(home)))[:5]
    return dict([(test, took) for test, took in tests.items() if test.partition("::")[0] in files][:60])


def run(folder: Path, seconds: float) -> None:
    """Plant each fault of faults.csv and record the first test that fails."""
    with (folder / "faults.csv").open(encoding="utf-8", newline="") as stream:
        faults = [Fault(**{**row, "number": int(row["number"])}) for row in csv.DictReader(stream)]  # type: ignore
    modules = sources(folder / "tree", FOLDERS)
    callers, times = tests_of_functions(folder)
    done = len(read_lines(folder / "found.jsonl"))
    for fault, place in list(zip(faults, find_again(faults, modules)))[done:]:
        found: dict[str, Any] = {"fault": fault._asdict(), "planted": place is not None}
        if place is not None:
            found["place"] = f"{place.fault.module}:{place.fault.function}"
            tests = chosen_tests(callers.get(found["place"], set()), times, seconds)
            found.update(chosen=len(tests), **run_fault(folder, modules, place, tests, seconds))
        add_line(folder / "found.jsonl", found)
        print(fault.module, fault.function, fault.kind, "|", found.get("test") or "not found", flush=True)


def run_fault(
    folder: Path, modules: dict[str, str], place: Place, tests: dict[str, float], seconds: float
) -> dict[str, Any]:
    """Plant one fault and return the first test that fails; "" if none does."""
    module = place.fault.module
    file, ran, used = in_package(folder / "plain", module), 0, 0.0
    answer = {"failed": "", "reason": ""}
    file.write_text(planted(modules[module], place), encoding="utf-8")
    shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
    for part in (first_tests(module, tests), tests):
        if part and not answer["failed"]:
            names = sorted({test.partition("::")[0] for test in part})
            answer = run_tests(folder, folder / "plain", names, part, seconds)
            ran, used = len(answer["tests"]), used + answer["cpu"]  # type: ignore[operator]
    file.write_text(modules[module], encoding="utf-8")
    shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
    return {"test": answer["failed"], "reason": answer["reason"], "ran": ran, "cpu": used}


def result_of(line: dict[str, Any]) -> tuple[int, str]:
    """Return the column of a fault in the summary, and what the table says about it."""
    if not line["planted"]:
        return 3, "cannot be planted any more"
    if line["test"]:
        return 1, str(line["test"]).partition("::")[0]
    return 2, f"**not found** by {line['ran']} tests in {line['cpu']:.0f} s" if line["ran"] else "**no test calls it**"


def table(folder: Path) -> str:
    """Return the Markdown of what was found: a summary by folder, then every fault."""
    parts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    rows = ["| module | function | kind | change | found first by |", "|---|---|---|---|---|"]
    for line in read_lines(folder / "found.jsonl"):
        fault = line["fault"]
        column, text = result_of(line)
        part = parts[next(name for name in FOLDERS if fault["module"].startswith(name + "/"))]
        part[0] += 1
        part[column] += 1
        change = f"`{fault['change'][:110]}`".replace("|", "\\|")
        rows.append(f"| {fault['module']} | {fault['function']} | {fault['kind']} | {change} | {text} |")
    parts["all"] = [sum(column) for column in zip(*parts.values())]
    summary = ["| folder | faults | found | not found | cannot be planted |", "|---|--:|--:|--:|--:|"]
    summary += [f"| {name} | " + " | ".join(map(str, counts)) + " |" for name, counts in parts.items()]
    return "\n".join([INTRODUCTION, *summary, "", *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("choose", "cover", "run", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=49)
    parser.add_argument("--seconds", type=float, default=BUDGET, help="CPU seconds of one test file or of one fault")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose sources and tests are used")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/planted_faults.md")
    given = parser.parse_args()
    folder = given.folder.resolve()
    prepare(folder, given.root)
    if given.step == "choose":
        with (folder / "faults.csv").open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(Fault._fields)
            writer.writerows(choose(sources(folder / "tree", FOLDERS), given.count, given.seed))
    elif given.step == "table":
        given.output.write_text(table(folder), encoding="utf-8")
    else:
        for library in ("numpy", "pandas", "yaml", "pydantic", "plotly", "jinja2"):  # before each fork
            __import__(library)
        if given.step == "cover":
            cover(folder, given.seconds)
        else:
            run(folder, given.seconds)


if __name__ == "__main__":
    main()

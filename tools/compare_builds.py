"""Run the same random scenarios with two builds of servesim, and compare all decisions and all metrics.

    python tools/compare_builds.py OLD_PYTHON NEW_PYTHON --count 1000 [--first 0] [--jobs 2] [--plain]
    python tools/compare_builds.py OLD_PYTHON NEW_PYTHON --case 17          (or --shrink 17)

OLD_PYTHON and NEW_PYTHON are interpreters, each with its own installation of servesim and the packages of the tests.
The old build makes the scenarios of tests/random_scenarios.py. Both run each of them twice: alone, as a user does, and
with a decision log. requests.csv and the decision log must be equal, and so must the
error of a run that fails; a number that is not whole may have another last digit (1e-9), and so may the metrics of
result.json. The exit code is 1 if a scenario differs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.differences import distance, first_difference, is_same, metrics_of  # noqa: E402  # it is not installed

Tree = dict[str, Any]


class Build:
    """A process that runs scenarios with one build."""

    def __init__(self, python: str, packages: Optional[str] = None) -> None:
        self.command = [python, "-m", "tests.scenario_digests"]
        self.environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self.environment |= {} if packages is None else {"PYTHONPATH": packages}
        self.environment |= {"TMPDIR": "/dev/shm"} if os.access("/dev/shm", os.W_OK) else {}  # no disk: twice as fast
        self.start()

    def start(self) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            self.command, cwd=ROOT, env=self.environment, stdin=pipe, stdout=pipe, text=True, encoding="utf-8"
        )
        self.engine = str(self.receive().get("engine"))

    def send(self, message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Tree:
        """Return the answer. A process that crashes, or takes too long and is ended, is started again."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            return dict(json.loads(line))
        code = self.process.wait()
        if code >= 0:
            raise SystemExit(f"{' '.join(self.command)}: exit code {code}")
        self.start()
        return {"error": f"the process ended with signal {-code}; 14: it took too long"}


class Pair:
    """Both builds."""

    def __init__(self, old: str, new: str, packages: Optional[str], together: bool) -> None:
        self.old, self.new, self.together = Build(old), Build(new, packages), together

    def make(self, number: int) -> Tree:
        """Return the random scenario with a number."""
        self.old.send(number)
        return dict(self.old.receive()["case"])

    def run(self, case: Tree, with_texts: bool = False) -> tuple[Tree, Tree]:
        """Return the results of both builds."""
        message = {"case": case, "texts": with_texts}
        self.old.send(message)
        if self.together:
            self.new.send(message)
        found = self.old.receive()
        if not self.together:
            self.new.send(message)
        return found, self.new.receive()

    def differences(self, case: Tree, found: Tree, other: Tree) -> list[str]:
        """Return what differs between the results, one line for each file or metric."""
        if found.get("error") != other.get("error"):
            return [f"error\n  old: {found.get('error')}\n  new: {other.get('error')}"]
        metrics, others = metrics_in(found), metrics_in(other)
        texts = [
            f"{key}\n  old: {metrics.get(key)}\n  new: {others.get(key)}"
            for key in {**metrics, **others}
            if not is_same(metrics.get(key), others.get(key), key)
        ]
        if found.get("files") == other.get("files"):
            return texts
        contents, other_contents = (result.get("texts", {}) for result in self.run(case, True))
        for name in sorted({**contents, **other_contents}, reverse=True):  # decisions first
            first = first_difference(contents.get(name, ""), other_contents.get(name, ""))
            if first is not None:
                texts.insert(0, f"{name}, line {first[0]}\n  old: {first[1][:2000]}\n  new: {first[2][:2000]}")
        return texts


def metrics_in(found: Tree) -> Tree:
    """Return the metrics of all result.json of a scenario."""
    return dict(metrics_of(found.get("metrics", {})))


class Report:
    """Counts the scenarios, and prints those that differ."""

    def __init__(self) -> None:
        self.lock, self.features, self.started = threading.Lock(), Counter[str](), time.monotonic()
        self.count = self.different = self.rounded = 0
        self.largest = (0.0, "no metric", "")
        self.broken: dict[str, str] = {}  # text of an internal error -> a scenario

    def add(self, case: Tree, found: Tree, other: Tree, texts: list[str]) -> None:
        with self.lock:
            names = features(case, found)
            self.features.update(names)
            self.count += 1
            self.different += bool(texts)
            self.rounded += not texts and found.get("files") != other.get("files")
            others = metrics_in(other)
            for key, value in metrics_in(found).items():
                if isinstance(value, float) and isinstance(others.get(key), float):
                    self.largest = max(self.largest, (distance(value, others[key], key), key, case["name"]))
            if "traceback" in found:
                self.broken.setdefault(found["error"][:200], case["name"])
            if texts:
                print(
                    f"{case['name']}: {', '.join(sorted(names))}\n  {texts[0]}\n  ({len(texts)} differences)",
                    flush=True,
                )

    def print(self) -> None:
        for name, count in sorted(self.features.items()):
            print(f"{count:8}  {name}")
        for text, name in self.broken.items():
            print(f"internal error, for example of {name}: {text}")
        print(f"largest relative difference of a metric: {self.largest[0]:.2g} ({self.largest[1]}, {self.largest[2]})")
        print(f"{self.rounded} scenarios with other last digits in requests.csv or in the decision log")
        seconds = time.monotonic() - self.started
        print(f"{self.count} scenarios, {self.count - self.different} equal, {seconds:.0f} s")


HIDDEN = re.compile(
    r"profile|seed|slo|policy\.(?!name|version|async|pipeline|append)|.*router\.(?!name)|cluster\.pools\.name"
    r"|.*\.(at|factor|recover|replica|bandwidth|token_bytes|blocks)$"
)
HAPPENED = re.compile(r"preemptions|prefix_cache_hits|host_cache_hits|outcomes|fleet|stuck|transfers")
GIVEN = {"id", "arrival", "prompt", "output", "limit", "priority"}  # by every request


def features(case: Tree, found: Tree) -> set[str]:
    """Return the keys of a scenario and of its requests, also with short values, and what happened in its run."""
    rows, names = case["rows"] or [], {section for section in ("cluster", "speculative") if section in case["tree"]}
    for key, value in metrics_of(case["tree"]):
        words = re.sub(r"\.\d+", "", key).split(".")
        if not HIDDEN.match(".".join(words)) and (value not in (None, False, 0, [], "none", "fail") or "async" in key):
            is_short = len(words) <= 3 and (isinstance(value, (str, bool)) or value in range(8))
            names.add(".".join(words[:3]) + (f" {value}" if is_short else ""))
    names |= {f"requests: {key}" for row in rows for key in row.keys() - GIVEN}
    names |= {"requests: beam search" for row in rows if "sampling" in row and row["sampling"][2]}
    result, logged = (found.get("metrics", {}).get(f"{run}/result.json", {}) for run in ("run", "logged"))
    others = dict(metrics_of(logged))
    if "error" not in found and not all(is_same(value, others.get(key), key) for key, value in metrics_of(result)):
        names.add("run: a decision log changes the result of the old build")
    names |= {f"run: {key}" for key, value in metrics_of(result) if HAPPENED.match(key) and value}
    return names | ({"run: internal error"} if "traceback" in found else {"run: error"} if "error" in found else set())


def compare_all(pair: Pair, numbers: Iterator[int], report: Report) -> None:
    """Compare scenarios until no number is left."""
    for number in numbers:
        case = pair.make(number)
        found, other = pair.run(case)
        report.add(case, found, other, pair.differences(case, found, other))


def shrink(pair: Pair, case: Tree) -> Tree:
    """Return a scenario without all that the difference does not need."""
    while True:
        for smaller in smaller_cases(case):
            if pair.differences(smaller, *pair.run(smaller)):
                case = smaller
                break
        else:
            return case


def smaller_cases(case: Tree) -> Iterator[Tree]:
    """Yield the scenario without some requests, without a key of a request, or without a key of a section."""
    rows, size = case["rows"] or [], len(case["rows"] or [])
    while size > 1:
        size = (size + 1) // 2
        for start in range(0, len(rows), size):
            kept = [dict(row) for row in (*rows[:start], *rows[start + size :])]
            for row in kept:
                if row.get("follows") not in {other["id"] for other in kept}:
                    row.pop("follows", None)
            if kept:
                yield {**case, "rows": kept}
    for key in sorted({key for row in rows for key in row} - {"id", "arrival", "prompt", "output"}):
        yield {**case, "rows": [{name: row[name] for name in row if name != key} for row in rows]}
    for tree in without_a_key(case["tree"]):
        yield {**case, "tree": tree}


def without_a_key(tree: Any) -> Iterator[Any]:
    """Yield copies of a tree that have one key or one element less."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        rest = {name: tree[name] for name in keys if name != key}
        yield rest if isinstance(tree, dict) else list(rest.values())
        for smaller in without_a_key(tree[key]):
            changed = {name: smaller if name == key else tree[name] for name in keys}
            yield changed if isinstance(tree, dict) else list(changed.values())


def show(pair: Pair, case: Tree) -> int:
    """Print a scenario, what both builds make of it, and what differs."""
    found, other = pair.run(case, True)
    print(json.dumps(case, indent=1))
    for name, result in (("old", found), ("new", other)):
        print(f"\n== {name}: {result.get('error', 'no error')}", *result.get("traceback", ()), sep="\n")
        for file, text in result.get("texts", {}).items():
            print(f"-- {name}: {file}\n{text}")
        print(f"-- {name}: metrics\n{json.dumps(result.get('metrics', {}), indent=1)}")
    texts = pair.differences(case, found, other)
    print(f"\n== {len(texts)} differences", *texts, sep="\n")
    return int(bool(texts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD_PYTHON")
    parser.add_argument("new", metavar="NEW_PYTHON")
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="number of scenarios")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="number of the first scenario")
    parser.add_argument("--jobs", type=int, default=2, metavar="J", help="processes that work at the same time")
    parser.add_argument("--plain", action="store_true", help="run the new build in plain Python")
    parser.add_argument(
        "--case", metavar="NAME", help="print this scenario, such as 17, and the results of both builds"
    )
    parser.add_argument("--shrink", metavar="NAME", help="the same, without all that the difference does not need")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as packages:
        if args.plain:
            subprocess.run([args.new, ROOT / "tools" / "plain_copy.py", packages], check=True)
        count = max(1, args.jobs // 2) if args.case is None and args.shrink is None else 1
        plain = packages if args.plain else None
        pairs = [Pair(args.old, args.new, plain, args.jobs > 1) for _ in range(count)]
        print(f"old: {pairs[0].old.engine}\nnew: {pairs[0].new.engine}", flush=True)
        if args.case is not None or args.shrink is not None:
            case = pairs[0].make(int((args.case or args.shrink).split("-")[0]))
            return show(pairs[0], case if args.shrink is None else shrink(pairs[0], case))
        report, numbers = Report(), iter(list(range(args.first, args.first + args.count)))
        threads = [threading.Thread(target=compare_all, args=(pair, numbers, report)) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        report.print()
        return int(report.different > 0 or report.count < args.count)


if __name__ == "__main__":
    sys.exit(main())

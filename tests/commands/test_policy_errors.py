"""Errors of a user's policy: one line with the file and the line. Exit code 2 if it does not load, 1 if it fails."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Callable

import pytest
from servesim.core import Plan
from servesim.core.class_source import is_compiled

from .running import Said, run_sim

UNKNOWN_ARGUMENT = (  # messages of mypyc and of Python
    "'nothing' is an invalid keyword argument for __init__()"
    if is_compiled(Plan)
    else "Plan.__init__() got an unexpected keyword argument 'nothing'"
)
SCENARIO = """\
workload: {requests: 4, arrivals: {kind: burst}, lengths: {prompt: 8, output: 3}}
profile: {base: 0.001}
"""
HEAD = """\
from dataclasses import dataclass
from servesim.core import Chunk, Hold, Plan, Policy, Preemption, Rejection, Request

class Odd(Exception):
    def __init__(self, a, b):
        super().__init__("odd")

@dataclass(frozen=True)
class Mine(Policy):
    "Line 9 of the file."
"""
SERVE = """
    def decide(self, view):
        waiting = list(view.waiting)
        return Plan(chunks=[Chunk(r, r.pending) for r in waiting[:1]], decode=not waiting and view.decoding > 0)
"""
SORTED = "return 1\n    is_sorted = True\n    def sort_key(self, request):\n        "
FOREIGN = "Request(99, 0.0, 5, 5, 5)"
COMPILED = is_compiled(Plan)
# The class body, the line of the error, and the message.
DOES_NOT_LOAD = {
    "syntax": ("    def decide(self:\n", 11, "SyntaxError: "),
    "import": ("    import nowhere\n", 11, "ModuleNotFoundError: No module named 'nowhere'"),
    "exit": ("    raise SystemExit(0)\n", 11, "SystemExit: 0"),
    "mutable default": ("    sizes: list = []\n" + SERVE, 8, "ValueError: mutable default"),
    "no decide": ("    batch: int = 3\n", 9, "Mine has no method decide"),
    "annotation": ("    batch: 'Missing' = 3\n" + SERVE, 9, "NameError: name 'Missing' is not defined"),
    "type of a default": ("    batch: int = 'three'\n" + SERVE, 9, "batch: expected int, got 'three'"),
    "post init": (SERVE + "    def __post_init__(self):\n        {}['a']\n", 16, "KeyError: 'a'"),
    "post init value": (SERVE + "    def __post_init__(self):\n        int('x')\n", 16, "ValueError: invalid literal"),
    "rules": (SERVE + "    def rules(self):\n        return 3\n", 9, "rules: expected EngineRules, got 3"),
}
FAILS = {
    "none": ("return None", 11, "decide returned None, expected a Plan"),
    "number": ("return [1] * 10 ** 6", 11, "decide returned [1, 1, 1"),
    "exception": ("raise KeyError('two\\nlines')", 12, "KeyError: "),
    "lines": ("raise ValueError('two\\nlines ' * 999)", 12, "ValueError: two lines two lines"),
    "odd exception": ("raise Odd(1, 2)", 12, "Odd: odd"),
    "end of iteration": ("next(iter(()))", 12, "StopIteration"),
    "exit": ("raise SystemExit(0)", 12, "SystemExit: 0"),
    "recursion": ("return self.decide(view)", 12, "RecursionError: maximum recursion depth exceeded"),
    "argument": ("return Plan(nothing=3)", 12, f"TypeError: {UNKNOWN_ARGUMENT}"),
    "foreign chunk": (f"return Plan(chunks=[Chunk({FOREIGN}, 5)])", 11, "Request(99, "),
    "foreign preemption": (f"return Plan(preempt=[Preemption({FOREIGN})])", 11, "Request(99, "),
    "foreign rejection": (f"return Plan(reject=[Rejection({FOREIGN}, 'no')])", 11, "Request(99, "),
    # Compiled code checks types itself: an attribute when it is read, an argument when it is passed.
    "no chunk": ("return Plan(chunks=[None])", 11, f"a result of Mine: {'Type' if COMPILED else 'Attribute'}Error"),
    "text as time": ("return Plan(hold=Hold(0, until='soon'))", 12 if COMPILED else 11, "TypeError: "),
    "the same chunk twice": ("return Plan(chunks=[Chunk(view.waiting[0], 2)] * 2)", 11, "chunks has request 0 twice"),
    "twice": ("return Plan(reject=[Rejection(view.waiting[0], 'no')] * 2)", 11, "reject has request 0 twice"),
    "negative blocks": ("return Plan(chunks=[Chunk(view.waiting[0], 8, -5)])", 12, "expected at least 0, got -5"),
    "negative rows": ("return Plan(padding_rows=-1)", 12, "expected at least 0, got -1"),
    "sort key": (f"{SORTED}1 / 0", 15, "ZeroDivisionError"),
    "sort keys": (f"{SORTED}return None if request.id else 1", 11, "cannot use a result of Mine: TypeError"),
}


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Said]:
    """Return a function that runs `sim` in a folder with a scenario and a sweep."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    (tmp_path / "sweep.yaml").write_text(
        "base: scenario.yaml\nparams: {policy.name: ['mine.py:Mine'], engine.num_blocks: [64, 65]}\n"
    )

    return lambda *args: run_sim(capsys, *args)


@pytest.mark.parametrize("case", DOES_NOT_LOAD)
@pytest.mark.parametrize("line", ["run scenario.yaml --policy mine.py:Mine", "policies check mine.py:Mine"])
def test_policy_that_does_not_load(line: str, case: str, tmp_path: Path, sim: Callable[..., Said]) -> None:
    body, number, message = DOES_NOT_LOAD[case]
    (tmp_path / "mine.py").write_text(HEAD + body)
    said = sim(*line.split())
    assert (said.code, said.error.count("\n")) == (2, 1), said.error
    assert f"{tmp_path / 'mine.py'}:{number}: " in said.error
    assert message in said.error


@pytest.mark.parametrize("case", FAILS)
def test_policy_that_fails(case: str, tmp_path: Path, sim: Callable[..., Said]) -> None:
    body, number, message = FAILS[case]
    (tmp_path / "mine.py").write_text(f"{HEAD}    def decide(self, view):\n        {body}\n")
    said = sim("run", "scenario.yaml", "--policy", "mine.py:Mine", "-o", "out")
    assert (said.code, said.error.count("\n")) == (1, 1), said.error
    assert said.error.startswith(f"sim: {tmp_path / 'mine.py'}:{number}: ")
    assert message in said.error
    assert len(said.error) < 1000
    assert not (tmp_path / "out").exists()
    said = sim("policies", "check", "mine.py:Mine")
    assert (said.code, said.error.count("\n")) == (1, 1), said.error
    assert said.error.startswith(f"sim: {tmp_path / 'mine.py'}:")


# A policy that works, but also changes a field of a request. The value, and where it does it.
CHANGES = {
    "prompt": "1", "output": "1", "limit": "1", "arrival": "request.arrival - 1", "priority": "request.priority - 1",
    "sent": "request.sent - 1", "stop_at": "1", "session": "'mine'",
}  # fmt: skip


@pytest.mark.parametrize("place", ["decide", "sort_key"])
@pytest.mark.parametrize("field", CHANGES)
def test_policy_that_changes_a_request(field: str, place: str, tmp_path: Path, sim: Callable[..., Said]) -> None:
    change = f"request.{field} = {CHANGES[field]}"
    if place == "decide":
        lines = f"        for request in view.waiting:\n            {change}\n"
        body = SERVE.replace("        waiting =", f"{lines}        waiting =")
    else:
        body = f"{SERVE}    is_sorted = True\n    def sort_key(self, request):\n        {change}\n        return 1\n"
    (tmp_path / "mine.py").write_text(HEAD + body)
    said = sim("run", "scenario.yaml", "--policy", "mine.py:Mine", "-o", "out")
    assert (said.code, said.error.count("\n")) == (1, 1), said.error
    assert said.error.startswith(f"sim: {tmp_path / 'mine.py'}:12: ")
    assert f"Mine changed {field} of request 0" in said.error
    assert not (tmp_path / "out").exists()
    said = sim("policies", "check", "mine.py:Mine")
    assert (said.code, said.error.count("\n")) == (1, 1), said.error
    assert f"changed {field} of request " in said.error


def test_check_finds_a_policy_that_never_schedules(tmp_path: Path, sim: Callable[..., Said]) -> None:
    (tmp_path / "mine.py").write_text(HEAD + "    def decide(self, view):\n        return Plan()\n")
    said = sim("policies", "check", "mine.py:Mine")
    assert (said.code, said.error.count("\n")) == (1, 1), said.error
    assert "does not serve a single short request" in said.error


def test_check_passes_a_correct_policy(tmp_path: Path, sim: Callable[..., Said]) -> None:
    (tmp_path / "mine.py").write_text(HEAD + SERVE.replace("waiting[:1]", "waiting[: not view.running]"))
    said = sim("policies", "check", "mine.py:Mine")
    assert (said.code, said.error) == (0, "")


@pytest.mark.parametrize(("jobs", "case"), [("1", "none"), ("2", "exit")])
def test_policy_that_fails_in_a_worker_process(jobs: str, case: str, tmp_path: Path, sim: Callable[..., Said]) -> None:
    body, number, message = FAILS[case]
    (tmp_path / "mine.py").write_text(f"{HEAD}    def decide(self, view):\n        {body}\n")
    (tmp_path / "sweep.yaml").write_text((tmp_path / "sweep.yaml").read_text() + "baseline: {policy.name: orca}\n")
    said = sim("sweep", "sweep.yaml", "-j", jobs, "-q", "-o", "out", "--no-report")
    assert (said.code, said.error) == (1, "")
    records = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert {r["error"] for r in records if r["config"]} == {f"{tmp_path / 'mine.py'}:{number}: {message}"}
    assert "error" not in records[0]


@pytest.mark.parametrize("warm_up", ["0", "1"])
def test_policy_that_fails_in_a_replay(warm_up: str, tmp_path: Path, sim: Callable[..., Said]) -> None:
    (tmp_path / "mine.py").write_text(f"{HEAD}    def decide(self, view):\n        return None\n")
    words = ("scenario.yaml", "--policy", "mine.py:Mine", "--backend", "fake", "--quiet", "--warm-up", warm_up)
    said = sim("replay", *words)
    assert said.code == 1
    assert said.error == f"sim: {tmp_path / 'mine.py'}:11: decide returned None, expected a Plan\n"


def test_policy_that_fails_in_a_server(tmp_path: Path, sim: Callable[..., Said]) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "mine.py").write_text(f"{HEAD}    def decide(self, view):\n        return None\n")
    said = sim("serve", "scenario.yaml", "--policy", "mine.py:Mine", "--backend", "fake", "--port", "0")
    assert said.code == 1
    assert said.error == f"sim: {tmp_path / 'mine.py'}:11: decide returned None, expected a Plan\n"


def test_user_policy_runs_in_a_replay(tmp_path: Path, sim: Callable[..., Said]) -> None:
    """The worker has another working folder; the name of the file is relative to that of the command."""
    (tmp_path / "mine.py").write_text(HEAD + SERVE)
    words = ("scenario.yaml", "--policy", "mine.py:Mine", "--backend", "fake", "--quiet", "--warm-up", "0")
    said = sim("replay", *words)
    assert (said.code, said.error) == (0, "")


LONG, DIGITS, DEEP = "n" * 5000, "9" * 5000, "[" * 5000
ODD_WORDS = {
    "long policy file": ("--policy", f"{LONG}.py:Mine"),
    "long policy name": ("--policy", LONG),
    "long preset": ("--preset", LONG),
    "long key": ("--set", f"policy.{LONG}=1"),
    "long scenario": (f"{LONG}.yaml",),
    "surrogates as a file": ("--policy", "\udcff.py:Mine"),
    "surrogates as a name": ("--policy", "\udcff"),
    "surrogates as a value": ("--set", "policy.name=\udcff"),
    "a surrogate that no system has": ("--policy", "\ud800.py:Mine"),
    "line breaks as a file": ("--policy", "a\nb.py:Mine"),
    "terminal sequences": ("--policy", "\x1b[2J.py:Mine"),
    "zero byte": ("--policy", "a\0b.py:Mine"),
    "folder as a policy": ("--policy", "folder.py:Mine"),
    "loop of links": ("--policy", "loop.py:Mine"),
    "endless file": ("--policy", "endless.py:Mine", "--trust"),
    "many digits": ("--set", f"engine.num_blocks={DIGITS}"),
    "many digits of a policy": ("--set", f"policy.decode_batch={DIGITS}"),
    "many digits as a seed": ("--seed", DIGITS),
    "deep list": ("--set", f"seed={DEEP}"),
    "deep closed list": ("--set", f"policy.decode_batch={'[' * 500}{']' * 500}"),
    "deep key": ("--set", f"{'a.' * 5000}b=1"),
    "unknown option": ("--a\nb",),
}


@pytest.mark.parametrize("case", ODD_WORDS)
def test_odd_words_give_one_short_line(case: str, tmp_path: Path, sim: Callable[..., Said]) -> None:
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "loop.py").symlink_to("loop.py")
    (tmp_path / "endless.py").symlink_to("/dev/zero")
    words = ODD_WORDS[case]
    said = sim("run", *(() if len(words) == 1 and words[0].endswith(".yaml") else ("scenario.yaml",)), *words)
    assert (said.code, said.error.count("\n")) == (2, 1), said.error
    assert said.error[:-1].isprintable()
    assert len(said.error) < 1300


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_unreadable_policy_file_gives_one_line(tmp_path: Path, sim: Callable[..., Said]) -> None:
    (tmp_path / "mine.py").write_text(HEAD + SERVE)
    (tmp_path / "mine.py").chmod(0)
    said = sim("run", "scenario.yaml", "--policy", "mine.py:Mine")
    assert (said.code, said.error.count("\n")) == (2, 1), said.error
    assert "cannot be read" in said.error

"""Known functions of llm-serving: the digest sees code, not texts; unknown code is refused with one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from servesim.calibrate.adapter import grouped_prefill
from servesim.calibrate.adapter.grouped_prefill import KNOWN, digest_of, unknown_functions

from .test_adapter_process import start_server, write_server

CODE = """
class Agent:
    def write(self, tokens, slots):
        for row, slot in enumerate(slots):
            self.memory[slot] = tokens[row]
"""
SAME_CODE = '''
"""A module."""
import logging

class Agent(object):
    names = ["x"]

    def write(self, tokens, slots):
        """Write tokens."""
        logging.debug("tokens %s", tokens)
        for row, slot in enumerate(slots):  # a comment
            print(f"row {row}")
            self.memory[
                slot
            ] = tokens[row]
'''
WORKER = """
class Worker:
    def _predict(self, input_ids, is_prefill, valid_batch_flag, current_batch_size=None, **generate_parms): pass
    @staticmethod
    def _get_valid_length(origin_inputs, default_padding_values): pass

class DisModel:
    def call(self, *args, **kwargs): pass
    def _assemble_pa_full_inputs(self, *args): pass
"""
GROUPED = '{"prefill_batch": 8}'


def test_a_digest_ignores_comments_texts_and_layout_but_no_code() -> None:
    known = digest_of(CODE, "Agent.write")
    assert known is not None
    assert digest_of(SAME_CODE, "Agent.write") == known
    for old, new in (("tokens[row]", "tokens[0]"), ("[slot] =", "[slot] +="), ("tokens, slots", "slots, tokens")):
        assert digest_of(CODE.replace(old, new), "Agent.write") not in (known, None)
    assert digest_of(CODE, "Agent.read") is None
    assert digest_of("class Agent(", "Agent.write") is None
    twice = CODE + CODE.replace("class Agent:", "").replace("write(self", "write(other")
    assert digest_of(twice, "Agent.write") != known  # Python uses the last definition


def test_functions_are_read_from_modules_that_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agents_of_a_test.py").write_text("raise SystemExit\n" + CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    name, known = "Agent.write", digest_of(CODE, "Agent.write")
    monkeypatch.setattr(grouped_prefill, "KNOWN", (("agents_of_a_test", name, known), ("agents_of_a_test", name, "0")))
    assert unknown_functions() == ["Agent.write in agents_of_a_test"]
    monkeypatch.setattr(grouped_prefill, "KNOWN", (("absent_package.agents", name, known),))
    assert unknown_functions() == ["Agent.write in absent_package.agents"]


def start_grouped(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Start a server whose worker is not known, with several prompts per prefill."""
    script = write_server(folder)
    package = folder / "mindspore_serving" / "worker"
    package.mkdir()
    (package / "worker.py").write_text(WORKER)
    return start_server(
        [sys.executable, "-m", "servesim.calibrate.adapter", str(script)],
        folder,
        SERVESIM_POLICY=GROUPED,
        **environment,
    )


def test_unknown_code_is_refused_with_one_line_that_names_it_and_says_how_to_go_on(tmp_path: Path) -> None:
    done = start_grouped(tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("adapter: prefill_batch above 1: unknown code: Worker._predict in mindspore_serving.")
    for _, name, _ in KNOWN:
        assert name in done.stderr
    assert "SERVESIM_MULTI_PREFILL=repair" in done.stderr
    assert done.stdout == ""


def test_the_variable_repairs_unknown_code_or_leaves_it_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    done = start_grouped(tmp_path / "a", SERVESIM_MULTI_PREFILL="repair")
    assert done.stderr.startswith("servesim repairs prefills of several prompts")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "called")
    (tmp_path / "b").mkdir()
    done = start_grouped(tmp_path / "b", SERVESIM_MULTI_PREFILL="1")
    assert done.stderr.startswith("servesim now schedules 3 slots")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "called")

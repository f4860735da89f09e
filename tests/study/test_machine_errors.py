"""Errors of the machine (memory, killed workers) are repeated by --resume, errors of the scenario are not."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.core import BadInput, PolicyError
from servesim.study.journal import read_journal
from servesim.study.single_run import is_machine_error

from . import sweeps
from .test_search import results, search_file

QUIET = ("-j", 1, "-q", "--no-report", "--trust")
OWN = """
import os
from pathlib import Path
from servesim.policies.llm_serving import LLMServing

class Mine(LLMServing):
    def decide(self, view):
        if self.decode_batch == 4 and Path({large!r}).exists():
            bytearray(1 << 62)  # more than any machine has
        if self.decode_batch == 4 and Path({deadly!r}).exists():
            os.kill(os.getpid(), 9)
        if self.decode_batch == 8 and Path({broken!r}).exists():
            raise ValueError("eight")
        return super().decide(view)
"""


@pytest.fixture
def faults(tmp_path: Path) -> dict[str, Path]:
    """Files: while one of them exists, configurations of the policy in own.py have this fault."""
    names = {name: tmp_path / name for name in ("large", "deadly", "broken")}
    (tmp_path / "own.py").write_text(OWN.format(**{name: str(path) for name, path in names.items()}))
    return names


def base(folder: Path) -> dict[str, Any]:
    return sweeps.base(workload=sweeps.workload(8), policy={"name": f"{folder / 'own.py'}:Mine"})


def errors(folder: Path) -> dict[Any, str]:
    """Return the errors of the runs that count, by configuration."""
    runs = {(run["config"], run["replication"]): run for run in read_journal(folder / "runs.jsonl")}
    return {key[0]: run["error"] for key, run in runs.items() if "error" in run}


def test_a_run_without_memory_is_repeated_and_one_whose_policy_fails_is_not(
    tmp_path: Path, faults: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = sweeps.sweep_file(tmp_path, base=base(tmp_path), params={"policy.decode_batch": [2, 4, 8]}, replications=1)
    out = tmp_path / "out"
    faults["large"].touch()
    faults["broken"].touch()
    assert sweeps.sim("sweep", file, "-o", out, *QUIET) == 1
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert "sim: warning: 1 of 4 runs failed because of the machine (" in said.err and "--resume" in said.err
    assert "MemoryError" in errors(out)[2] and "ValueError: eight" in errors(out)[3]
    first = (out / "runs.jsonl").read_bytes()
    for path in faults.values():
        path.unlink(missing_ok=True)
    assert sweeps.sim("sweep", file, "-o", out, "--resume", *QUIET) == 1
    assert "because of the machine" not in capsys.readouterr().err
    assert (out / "runs.jsonl").read_bytes().startswith(first)
    assert list(errors(out)) == [3]
    assert len(read_journal(out / "runs.jsonl")) == 5
    assert sweeps.sim("report", out) == 0


def test_the_result_after_a_lack_of_memory_is_that_of_a_sweep_without(tmp_path: Path, faults: dict[str, Path]) -> None:
    file = sweeps.sweep_file(tmp_path, base=base(tmp_path), params={"policy.decode_batch": [2, 4, 8]}, ci="20%")
    faults["large"].touch()
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", *QUIET) == 1
    faults["large"].unlink()
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", "--resume", *QUIET) == 0
    assert sweeps.sim("sweep", file, "-o", tmp_path / "whole", *QUIET) == 0
    for name in ("summary.csv", "best.yaml", "pareto.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_search_repeats_trials_without_memory_and_proposes_what_it_would_have_proposed(
    tmp_path: Path, faults: dict[str, Path]
) -> None:
    pytest.importorskip("optuna", reason="needs the extra `search` (optuna)")
    kinds = {"policy.decode_batch": [2, 4, 8, 16], "policy.order": ["arrival", "longest-output"]}
    file = search_file(tmp_path, base=base(tmp_path), params=kinds, trials=12, batch=3)
    faults["large"].touch()
    assert sweeps.sim("search", file, "-o", tmp_path / "out", *QUIET) == 1
    faults["large"].unlink()
    assert sweeps.sim("search", file, "-o", tmp_path / "out", "--resume", *QUIET) == 0
    assert sweeps.sim("search", file, "-o", tmp_path / "whole", *QUIET) == 0
    assert results(tmp_path / "out")["best.yaml"] == results(tmp_path / "whole")["best.yaml"]
    assert not errors(tmp_path / "out")


@pytest.mark.slow
def test_a_sweep_that_ends_because_its_workers_are_killed_continues_later(
    tmp_path: Path, faults: dict[str, Path]
) -> None:
    file = sweeps.sweep_file(tmp_path, base=base(tmp_path), params={"policy.decode_batch": [2, 4, 8]})
    faults["deadly"].touch()
    words = ("sweep", file, "-o", tmp_path / "out", "-j", 2, "-q", "--trust")
    process = sweeps.start(*words)
    _, error = process.communicate()
    assert process.returncode == 1
    assert error.startswith("sim: workers died 4 times on configuration/replication ") and error.count("\n") == 1
    assert "--resume" in error
    faults["deadly"].unlink()
    process = sweeps.start(*words, "--resume")
    assert process.wait() == 0
    assert sweeps.sim("sweep", file, "-o", tmp_path / "whole", "-j", 1, "-q", "--trust") == 0
    assert sweeps.contents(tmp_path / "out") == sweeps.contents(tmp_path / "whole")


@pytest.mark.slow
def test_killed_workers_end_a_comparison_with_one_line(tmp_path: Path, faults: dict[str, Path]) -> None:
    scenario = base(tmp_path)
    scenario["policy"]["decode_batch"] = 4
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(scenario))
    faults["deadly"].touch()
    process = sweeps.start(
        "compare", tmp_path / "a.yaml", tmp_path / "a.yaml", "--replications", 3, "-j", 2, "-q", "--trust"
    )
    _, error = process.communicate()
    assert process.returncode == 1
    assert error.startswith("sim: workers died 4 times on ") and error.count("\n") == 1


def raised(cause: Exception) -> Exception:
    """Return an error that hides its cause, as files and policies raise it."""
    try:
        try:
            raise cause
        except Exception:
            raise BadInput("trace.csv: cannot be read") from None
    except BadInput as bad:
        return bad


def test_the_cause_decides_whose_error_it_is() -> None:
    assert is_machine_error(MemoryError())
    assert is_machine_error(OSError(errno.ENOSPC, "No space left on device"))
    assert is_machine_error(raised(OSError(errno.EMFILE, "Too many open files")))
    assert not is_machine_error(raised(FileNotFoundError(errno.ENOENT, "no such file")))
    assert not is_machine_error(PolicyError("own.py:3: ValueError"))
    assert not is_machine_error(ZeroDivisionError())
    assert not is_machine_error(RecursionError())

"""A vLLM server as a child process: why it ended, and files that a second start does not overwrite."""

from __future__ import annotations

from pathlib import Path

import pytest
from servesim.calibrate.vllm.server import new_file, root_cause

ENGINE = "(EngineCore pid=7) ERROR 11-17 [core.py:1402]"
ELSEWHERE = (
    "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
)
VALIDATION = """(APIServer pid=5) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=5)   Value error, User-specified max_model_len (4096) is greater than the derived max_model_len
(APIServer pid=5)     For further information visit https://errors.pydantic.dev/2.12/v/value_error"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (f"{ENGINE} ValueError: No blocks.\n{ENGINE} Traceback\n{ELSEWHERE}", "ValueError: No blocks."),
        (ELSEWHERE, ELSEWHERE.partition(") ")[2]),
        ("WARNING OSError: later\nerror: unrecognized arguments: --x", "error: unrecognized arguments: --x"),
        (VALIDATION, "User-specified max_model_len (4096) is greater than the derived max_model_len"),
        ("nothing", None),
    ],
)
def test_the_cause_is_the_last_error_that_does_not_point_elsewhere(log: str, cause: str | None) -> None:
    assert root_cause(log) == cause


def test_a_file_of_an_earlier_start_stays(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for name in ("steps.jsonl", "steps-2.jsonl", "steps-3.jsonl"):
        assert new_file(path) == tmp_path / name
        (tmp_path / name).touch()

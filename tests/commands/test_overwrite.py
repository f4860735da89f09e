"""`-o DIR` does not overwrite a measurement or a profile. Simulated runs may be overwritten: they can be repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from .running import run_sim

WORKLOAD = ("-X", "5", "-T", "2")


@pytest.mark.parametrize(
    ("command", "kept", "content"),
    [
        (("calibrate", "derive", "--device", "L40S"), "profile.yaml", "profile"),
        (("calibrate", "logs", "runs.yaml"), "profile.yaml", "profile"),
        (("calibrate", "import", "results", "result.json"), "manifest.json", "run"),
        (("calibrate", "vllm", "--url", "http://127.0.0.1:9", "--steps", "steps.jsonl"), "profile/profile.yaml", "profile"),
        (("replay", *WORKLOAD, "--backend", "fake"), "live/result.json", "replay"),
        (("run", *WORKLOAD), "sent.jsonl", "measured run"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_a_measurement_or_profile_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...], kept: str, content: str
) -> None:
    file = tmp_path / "out" / kept
    file.parent.mkdir(parents=True)
    file.write_text("of an earlier run")
    said = run_sim(capsys, *command, "-o", str(tmp_path / "out"))
    assert said.code == 2
    message = f"sim: {tmp_path / 'out'}: already holds a {content}, which is not overwritten; use another folder\n"
    assert said.error == message and said.out == ""
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [file]
    assert file.read_text() == "of an earlier run"


def test_a_simulated_run_may_be_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert run_sim(capsys, "run", *WORKLOAD, "-o", str(tmp_path)).code == 0

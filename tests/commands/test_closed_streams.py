"""Commands with closed standard streams (`sim run FILE >&-`) work, and their files hold only what belongs there."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .. import warm

SWEEP = "base: {workload: {contest: {X: 5, T: 4}}}\nparams: {policy.decode_batch: [8, 16]}\n"


def shell(folder: Path, words: str, closed: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a shell that closes streams."""
    return subprocess.run(
        ["bash", "-c", f"'{warm.sim()}' {words} {closed}"], capture_output=True, text=True, cwd=folder, check=False
    )


def test_a_run_writes_the_same_files_without_its_streams(tmp_path: Path) -> None:
    folders = {"open": "", "a": ">&-", "b": "2>&-", "c": "<&-", "d": "<&- >&- 2>&-"}
    for name, closed in folders.items():
        done = shell(tmp_path, f"run -X 5 -T 4 -o {name}", closed)
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        files = {path.name for path in (tmp_path / name).iterdir()}
        assert files == {path.name for path in (tmp_path / "open").iterdir()}
        for file in files - {"manifest.json"}:  # it has the time of the run
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "open" / file).read_bytes()


def test_workers_print_nothing_into_the_journal_of_a_sweep_without_standard_output(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    for name, jobs, streams in (("open", 1, ""), ("closed", 2, ">&- 2>&-")):
        assert shell(tmp_path, f"sweep sweep.yaml -j {jobs} --no-report -o {name}", streams).returncode == 0
    assert (tmp_path / "closed/runs.jsonl").read_bytes() == (tmp_path / "open/runs.jsonl").read_bytes()


def test_an_error_without_standard_output_is_one_line(tmp_path: Path) -> None:
    done = shell(tmp_path, "run -X 5 --policy vlm", ">&-")
    assert done.returncode == 2
    assert done.stderr.startswith("sim: ") and done.stderr.count("\n") == 1

"""The warm `sim` of the tests does what a fresh `sim` does."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .events import wait_until
from .warm import sim

FRESH = [sys.executable, "-m", "servesim"]
LONG = ["run", "-X", "5", "-T", "1000000"]  # it does not end before it is killed


@pytest.mark.parametrize("words", ["--version", "run -X 5 -T 2", "run -X 5 --policy vlm", "run nofile"])
def test_a_warm_command_prints_and_ends_as_a_fresh_one(words: str, tmp_path: Path) -> None:
    warm, fresh = (
        subprocess.run([*command, *words.split()], cwd=tmp_path, capture_output=True, text=True, check=False)
        for command in ([sim()], FRESH)
    )
    assert (warm.returncode, warm.stdout, warm.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)


def test_a_warm_command_has_the_streams_folder_and_variables_of_its_caller(tmp_path: Path) -> None:
    lines = (
        "cat trace.csv | sim run --trace - 2>&- >out",
        "echo $? >&2",
        "sim run nofile >&-",
        "sim run x | head -1",
    )
    line = "; ".join(lines).replace("sim ", f"{sim()} ")
    (tmp_path / "trace.csv").write_text("arrival,prompt,output\n1,10,5\n", encoding="utf-8")
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == "0\nsim: nofile: no such file\nsim: x: no such file\n"
    assert (tmp_path / "out").stat().st_size > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_a_warm_command_ends_it(number: int, tmp_path: Path) -> None:
    def running() -> list[str]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # ended, or of another user
                found += [folder.name] if (folder / "cwd").samefile(tmp_path) else []
        return found

    client = subprocess.Popen([sim(), *LONG], cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    wait_until(lambda: len(running()) > 1, "the forked process")
    client.send_signal(number)
    assert client.wait() != 0
    wait_until(lambda: not running(), "the end of the forked process")

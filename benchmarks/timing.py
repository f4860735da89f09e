"""CPU time of a call or of a process beside that of a bare SimPy loop; used by the benchmarks of speed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Optional

import simpy
from servesim.version import is_compiled

REFERENCE_RATE = 0.7e6  # bare SimPy timeouts/s of the machine that targets are for
LOOP = 200_000  # timeouts of the bare loop
POLL = 0.2  # seconds between two looks at the memory of a process


class Timing(NamedTuple):
    """The time of one run."""

    seconds: float  # CPU time
    rate: float  # bare SimPy timeouts/s, measured before and after the run
    steps: int

    @property
    def timeouts(self) -> float:
        """The number of bare timeouts that run in the same time."""
        return self.seconds * self.rate

    @property
    def reference(self) -> float:
        """The seconds on the machine that targets are for."""
        return self.timeouts / REFERENCE_RATE


class Process(NamedTuple):
    """A `sim` command that has ended; its children count too."""

    timing: Timing
    wall: float  # seconds from its start to its end, to within POLL
    memory: int  # bytes at the peak; pages that several processes share count once
    printed: str


def simpy_timeout_rate(count: int = LOOP) -> float:
    """Return the timeouts per second of a bare SimPy loop."""

    def loop(env: simpy.Environment) -> Any:
        for _ in range(count):
            yield env.timeout(1.0)

    env = simpy.Environment()
    env.process(loop(env))
    start = time.process_time()
    env.run()
    return count / (time.process_time() - start)


def time_call(call: Callable[[], int], loop: int = LOOP) -> Timing:
    """Time a call that returns its number of steps, between two runs of the bare loop."""
    before, start = simpy_timeout_rate(loop), time.process_time()
    steps = call()
    seconds = time.process_time() - start
    return Timing(seconds, (before + simpy_timeout_rate(loop)) / 2, steps)


def median_timing(timings: Sequence[Timing]) -> Timing:
    """Return the timing with the median number of bare timeouts."""
    return sorted(timings, key=lambda timing: timing.timeouts)[len(timings) // 2]


def run_sim(words: Sequence[str], env: Optional[Mapping[str, str]] = None, loop: int = LOOP) -> Process:
    """Run a `sim` command, from the start of its process to the end."""
    before, start, peak = simpy_timeout_rate(loop), time.perf_counter(), 0
    with tempfile.TemporaryFile() as printed:
        child = subprocess.Popen([sys.executable, "-m", "servesim", *words], env=env, stdout=printed)
        pid = 0
        while pid == 0:
            peak = max(peak, memory_of(child.pid))
            time.sleep(POLL)
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        wall = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            sys.exit(f"sim {' '.join(words)} ended with exit code {child.returncode}")
        printed.seek(0)
        text = printed.read().decode()
    timing = Timing(usage.ru_utime + usage.ru_stime, (before + simpy_timeout_rate(loop)) / 2, 0)
    largest = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Process(timing, wall, max(peak, largest), text)


def memory_of(pid: int) -> int:
    """Return the bytes of a process and its children on Linux; 0 if it has ended."""
    total, folder = 0, Path(f"/proc/{pid}")
    with suppress(OSError):
        lines = (folder / "smaps_rollup").read_text().splitlines()
        total = sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        children = [word for file in folder.glob("task/*/children") for word in file.read_text().split()]
        total += sum(memory_of(int(child)) for child in children)
    return total


def judge(value: float, limit: float, unit: str) -> str:
    """Return the target and whether it was reached."""
    return "" if limit == math.inf else f"  target {limit:g}{unit}: {'ok' if value <= limit else 'MISSED'}"


def target(value: float) -> float:
    """Return a target of compiled runs; a plain installation has none."""
    return value if is_compiled() else math.inf


def print_row(label: str, timing: Timing, seconds: float) -> None:
    """Print one row of the table."""
    print(
        f"{label:<34} {timing.seconds:7.3f} s {timing.steps:>9} steps {timing.timeouts / 1e3:7.0f} k bare timeouts"
        f" = {timing.reference:6.3f} s at 0.7 M/s{judge(timing.reference, seconds, ' s')}",
        flush=True,
    )

"""The README's table of speed: python tools/speed_table.py runs benchmarks/speed.py and writes results/speed.md there.

What other simulators take for the same file is carried over: CPU seconds on one Neoverse-N1 core, on which a bare SimPy
loop does 0.73 M timeouts a second. Ours is timed here, and put on that core by the same loop timed in the same run.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import servesim
from pages import ROOT
from reference import table

SAME_CORE = 0.73e6  # bare timeouts a second of the core that the others were timed on
OTHERS = {"Vidur": 20.5, "DistServe-sim": 11.8, "BLIS (Go)": 9.3, "sched-sim": 7.7, "AISimulate (Rust)": 1.5}
TRIES = 3
WHAT = (
    "10,000 requests (Poisson, 8.2 a second, prompts of 265 and answers of 255 tokens on average, lognormal), batch "
    "128, per-request results included, import not counted:"
)
THEIRS = "The others: as they were timed there on the same file, carried over and not timed by us."


def timed() -> tuple[float, float]:
    """Return our CPU seconds and the bare loop's rate, from the run in which the machine was least disturbed."""
    found = []
    for _ in range(TRIES):
        done = subprocess.run(
            [sys.executable, "benchmarks/speed.py"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        rate = re.search(r"bare SimPy: ([\d.]+) M timeouts/s", done.stdout)
        seconds = re.search(r"batch 128 +([\d.]+) s", done.stdout)
        assert rate is not None
        assert seconds is not None, done.stdout
        found.append((float(seconds[1]), float(rate[1]) * 1e6))
    return max(found, key=lambda pair: pair[1])


def processor() -> str:
    """Return what this machine calls its processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    """Time ours, write the table."""
    seconds, rate = timed()
    there = seconds * rate / SAME_CORE
    rows = [[f"**servesim {servesim.__version__}**", f"**{there:.2f}**", "by ratio, see below"]]
    rows += [[name, f"{other:g}", f"{other / there:.0f} times as long"] for name, other in OTHERS.items()]
    ours = (
        f"Ours: {seconds:.2f} s by `benchmarks/speed.py` on {date.today()} with Python {platform.python_version()} on "
    )
    ours += (
        f"{processor()}, where a bare SimPy loop does {rate / 1e6:.2f} M timeouts/s; put on the other core, where it "
    )
    ours += "does 0.73 M/s, by the ratio of the two."
    text = table(("simulator", "CPU seconds on one Neoverse-N1 core", ""), rows)
    (ROOT / "benchmarks" / "results" / "speed.md").write_text(f"{WHAT}\n\n{text}\n{ours}\n{THEIRS}\n", encoding="utf-8")
    print(text, ours)


if __name__ == "__main__":
    main()

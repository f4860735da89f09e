"""Write the table of docs/speed.md: python tools/speed_table.py runs benchmarks/speed.py, writes results/speed.md.

The times of other simulators are not measured here: they are CPU seconds for the same file on one Neoverse-N1 core.
A bare SimPy loop runs 0.73 M timeouts/s there. Our time is measured here and scaled by the rate of the same loop.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from datetime import date

import servesim
from generate_tables import table
from run_doc_examples import ROOT
from servesim.version import is_compiled

REFERENCE_RATE = 0.73e6  # SimPy timeouts/s on the core of the other simulators' times
OTHER_SECONDS = {"Vidur": 20.5, "DistServe-sim": 11.8, "BLIS (Go)": 9.3, "sched-sim": 7.7, "AISimulate (Rust)": 1.5}
REPEATS = 3
WORKLOAD_NOTE = (
    "10,000 requests: Poisson arrivals at 8.2 requests/s, lognormal lengths with means of 265 prompt tokens and 255 "
    "output tokens. servesim runs the policy `llm-serving` with a batch of at most 128 requests and a linear cost "
    "model. Times include per-request results and exclude the import:"
)
OTHERS_NOTE = (
    "The other times were given to us with the request file, measured on that core. Versions and settings of these "
    "simulators were not given, and we did not repeat the measurements."
)


def measure() -> tuple[float, float]:
    """Return our CPU seconds and the rate of the bare loop, from the run with the highest rate (least disturbed)."""
    runs = []
    for _ in range(REPEATS):
        done = subprocess.run(
            [sys.executable, "benchmarks/speed.py", "--only", "first"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        rate = re.search(r"bare SimPy: ([\d.]+) M timeouts/s", done.stdout)
        seconds = re.search(r"batch 128 +([\d.]+) s", done.stdout)
        assert rate is not None
        assert seconds is not None, done.stdout
        runs.append((float(seconds[1]), float(rate[1]) * 1e6))
    return max(runs, key=lambda pair: pair[1])


def processor() -> str:
    """Return the processor name of this machine; /proc/cpuinfo has only numbers on Arm."""
    found = ""
    if shutil.which("lscpu"):
        printed = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
        found = "".join(re.findall(r"^Model name: +(.+)$", printed, re.MULTILINE)[:1])
    return found or platform.processor() or platform.machine()


def main() -> None:
    """Measure servesim and write the table."""
    seconds, rate = measure()
    scaled = seconds * rate / REFERENCE_RATE
    kind = "compiled" if is_compiled() else "plain Python"
    rows = [[f"**servesim {servesim.__version__}, {kind}** (scaled, see below)", f"**{scaled:.2f}**", ""]]
    rows += [[name, f"{other:g}", f"{other / scaled:.0f}"] for name, other in OTHER_SECONDS.items()]
    source = (
        f"servesim: {seconds:.2f} s, measured by `benchmarks/speed.py` on {date.today()} (Python "
        f"{platform.python_version()}, {processor()}). To compare the two CPUs, a small SimPy loop ran on both: "
        f"{rate / 1e6:.2f} million events/s on ours, 0.73 million events/s on the Neoverse-N1 (given to us). The table "
        f"therefore shows {seconds:.2f} s × {rate / 1e6:.2f} / 0.73 = {scaled:.2f} s."
    )
    text = table(("simulator", "CPU seconds on one Neoverse-N1 core", "time / servesim's time"), rows)
    path = ROOT / "benchmarks" / "results" / "speed.md"
    path.write_text(f"{WORKLOAD_NOTE}\n\n{text}\n{source}\n{OTHERS_NOTE}\n", encoding="utf-8")
    print(text, source)


if __name__ == "__main__":
    main()

"""Measure the tables of docs/speed.md and the sentence of README: python tools/speed_table.py [users] [sweeps] [others]

It runs benchmarks/speed.py and sweep_speed.py, writes benchmarks/results/speed*.csv and fills the pages.

The times of other simulators are not measured here: they are CPU seconds for the same file on one Neoverse-N1 core.
A bare SimPy loop runs 0.73 M timeouts/s there. Our time is measured here and scaled by the rate of the same loop.
"""

from __future__ import annotations

import csv
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from typing import Any

import servesim
from run_doc_examples import ROOT
from servesim.version import is_compiled

RESULTS = ROOT / "benchmarks" / "results"
REFERENCE_RATE = 0.7e6  # SimPy timeouts/s of the core that users' rows are for
OTHERS_RATE = 0.73e6  # of the core of the other simulators' times
OTHER_SECONDS = {"Vidur": 20.5, "DistServe-sim": 11.8, "BLIS (Go)": 9.3, "sched-sim": 7.7, "AISimulate (Rust)": 1.5}
REPEATS = 3


def benchmark(script: str, *words: str) -> list[Any]:
    """Run a benchmark; return the lines of JSON that it prints."""
    command = [sys.executable, f"benchmarks/{script}.py", *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def measure_users() -> None:
    """Write the rows of what users run."""
    write_users(benchmark("speed", "--only", "users"))


def write_users(rows: Iterable[Any]) -> None:
    """Write rows of `speed.py --only users --json`."""
    cells = []
    for label, (seconds, rate, calls), _, ratio in rows:
        text = f"{seconds * rate / REFERENCE_RATE:.2g}" + (f" (× {ratio:.1f})" if ratio else "")
        cells.append([label, f"{calls:,}" if calls else "", text, f"{seconds * rate / calls:.1f}" if calls else ""])
    write("speed_users", ("what", "model calls", "CPU seconds", "bare timeouts per call"), cells, measured())


def measure_sweeps() -> None:
    """Write the rows of sweeps."""
    cells = [
        (f"{row['configurations']:,}", *(f"{row[key]:.1f}" for key in ("wall_ms", "cpu_ms")),
         f"{row['peak_mb']:.0f} MB", f"{row['folder_mb']:.1f} MB", f"{row['report_wall_s']:.1f} s")
        for row in benchmark("sweep_speed")
    ]  # fmt: skip
    head = ("configurations", "ms per configuration", "ms of CPU time", "peak memory", "folder", "`sim report`")
    write("speed_sweeps", head, cells)


def measure_others() -> None:
    """Write our time beside those of other simulators, from the run with the highest rate (least disturbed)."""
    runs = [benchmark("speed", "--only", "first")[0] for _ in range(REPEATS)]
    seconds, rate, _ = max(runs, key=lambda run: float(run[1]))
    scaled = seconds * rate / OTHERS_RATE
    kind = "compiled" if is_compiled() else "plain Python"
    rows = [[f"**servesim {servesim.__version__}, {kind}** (scaled)", f"**{scaled:.2f}**", ""]]
    rows += [[name, f"{other:g}", f"{other / scaled:.0f}"] for name, other in OTHER_SECONDS.items()]
    note = f"{seconds:.2f} s × {rate / 1e6:.2f} / 0.73: million bare timeouts/s here and on that core."
    write("speed", ("simulator", "CPU seconds on one Neoverse-N1 core", "time / servesim's time"), rows, note)


def measured() -> str:
    """Return when and where it was measured."""
    return f"Measured on {date.today()} (Python {platform.python_version()}, {processor()})."


def processor() -> str:
    """Return the processor name of this machine; /proc/cpuinfo has only numbers on Arm."""
    found = ""
    if shutil.which("lscpu"):
        printed = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
        found = "".join(re.findall(r"^Model name: +(.+)$", printed, re.MULTILINE)[:1])
    return found or platform.processor() or platform.machine()


def write(name: str, head: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> None:
    """Write a table of results, with a note."""
    with (RESULTS / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        file.write(f"# {note}\n" if note else "")
        csv.writer(file, lineterminator="\n").writerows([head, *rows])


def speed_sentence() -> str:
    """Return the sentence of README, from the stored results."""
    seconds = {row["what"]: row["CPU seconds"] for row in read("speed_users")}
    sweep = "".join(
        f", and a sweep {row['ms of CPU time']} ms per configuration of 200 requests"
        for row in read("speed_sweeps")[:1]
    )
    return (
        f"It is fast: 10,000 requests take {seconds['vllm-v1, llama-3.1-8b on H100']} s with the scheduler of vLLM, "
        f"Llama 3.1 8B and H100, {seconds['vllm-v1, h200-llama2-7b']} s with the bundled H200 profile, "
        f"{seconds['vllm-v1, gpt-oss-20b on H100']} s for gpt-oss-20b{sweep}: CPU time of a core that runs "
        "0.7 million bare SimPy timeouts per second ([fleets, reports and other simulators](docs/speed.md)).\n"
    )


def read(name: str) -> list[dict[str, str]]:
    """Return the rows of stored results; none if they were not measured yet."""
    path = RESULTS / f"{name}.csv"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


PARTS = {"users": measure_users, "sweeps": measure_sweeps, "others": measure_others}


def main() -> None:
    """Measure the parts, and fill README and docs/speed.md."""
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
    subprocess.run([sys.executable, "tools/generate_tables.py"], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()

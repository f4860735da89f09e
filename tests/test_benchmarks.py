"""Each benchmark that a document names runs in its smallest form, or shows its help if it needs a device or server."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT, SHARED

MOONCAKE = SHARED / "data" / "traces" / "mooncake_conversation.csv.gz"
CURVES = SHARED / "data" / "measured" / "aiconfigurator-silicon" / "points.csv.gz"
NEEDS_DEVICE = ("gpu_sampling", "gpu_tune_loop", "h200_replay", "kbk_replay", "vllm_inside")
QUICK = {"replay_settings": [], **{name: ["--help"] for name in NEEDS_DEVICE}}  # the first is a module of h200_replay
SLOW = {
    "ascend_accuracy": [],
    "cache_size": [str(MOONCAKE), "--requests", "20"],
    "closed_loops": ["CURVE"],
    "fuzz": ["--target", "trace", "--count", "2"],
    "interval_check": ["--engines", "1", "--draws", "2"],
    "proof": ["EMPTY", "--only", "prefix"],  # a set without data is skipped
    "routers": ["prefix"],
    "sharing_savings": ["LENGTHS", "LENGTHS"],
    "speed": ["--quick"],
    "sweep_speed": ["--configs", "4", "--requests", "5", "--jobs", "1"],
    "synthetic_engines": ["1"],
}
NEEDS_DATA = {"cache_size": MOONCAKE, "closed_loops": CURVES, "routers": MOONCAKE, "ascend_accuracy": SHARED / "data"}


def test_each_benchmark_that_a_document_names_has_a_smallest_form() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md")]
    pages += (ROOT / "benchmarks" / "results").glob("*.md")
    named = {name for page in pages for name in re.findall(r"benchmarks/(\w+)\.py", page.read_text(encoding="utf-8"))}
    assert named == {*QUICK, *SLOW} and len(named) > 10


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_benchmark_runs_in_its_smallest_form(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it in a process of its own, whose memory it may limit. 3: larger errors than expected, in so small a form."""
    if not NEEDS_DATA.get(name, ROOT).exists():
        pytest.skip(f"needs {NEEDS_DATA[name]}")
    script = ROOT / "benchmarks" / f"{name}.py"
    monkeypatch.syspath_prepend(str(script.parent))
    words = [small_file(word, tmp_path) if word.isupper() else word for word in {**QUICK, **SLOW}[name]]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stdout + done.stderr
    assert done.stdout or done.stderr or name == "replay_settings"


def small_file(word: str, folder: Path) -> str:
    """Write the file, or the empty folder, that a word in capitals stands for."""
    path = folder / word.lower()
    if word == "EMPTY":
        path.mkdir()
    elif word == "LENGTHS":
        path.write_text("prompt_tokens,output_tokens\n20,30\n40,10\n")
    else:
        from closed_loops import read_curves  # of the folder that the test has added to the path

        points = min(read_curves(CURVES).values(), key=len)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(points[0]))
            writer.writeheader()
            writer.writerows(points)
    return str(path)

"""benchmarks/proof.py: predictions of measured runs, their table and the data that they need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from proof_budget import arrivals
from proof_prefix import predict_pulse
from proof_rows import Row, median_error, read_rows, table, table_of_document, write_rows
from proof_warm_cache import prompts
from proof_watermark import predict_watermark


def row(measured: float, predicted: float, **rivals: float) -> Row:
    return Row("a, set", "run", "TTFT", measured, predicted, "rows | 1", rivals, "nothing", 'it is "bad"')


def test_rows_survive_the_file(tmp_path: Path) -> None:
    rows = [row(1065.0, 1203.25, Vidur=9.5), row(0.0, 2.0)]
    write_rows(tmp_path / "proof.csv", rows)
    assert read_rows(tmp_path / "proof.csv") == rows


def test_the_median_error_of_another_simulator_counts_only_its_own_runs() -> None:
    rows = [row(100.0, 110.0, Vidur=150.0), row(100.0, 98.0), row(100.0, 99.0, Vidur=110.0)]
    assert median_error(rows) == pytest.approx(0.02)
    assert median_error(rows, "Vidur") == pytest.approx(0.3)


def test_a_set_without_data_is_skipped(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "proof.py"), str(tmp_path), "--only", "prefix"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stderr.startswith("prefix: skipped, ")


def test_the_drawn_conversations_have_the_published_totals() -> None:
    lines = prompts()
    assert len(lines) == 300
    assert sum(prompt for prompt, _, _ in lines) == pytest.approx(1_741_762, rel=0.001)
    assert sum(output for _, output, _ in lines) == pytest.approx(155_000, rel=0.05)
    assert all(sum(int(piece.split(":")[1]) for piece in content.split()) == prompt for prompt, _, content in lines)


def test_the_regenerated_arrivals_have_the_published_number_of_requests(shared: Path) -> None:
    rows = table(shared / "data" / "measured" / "published" / "vllm-0.22-budget.csv")
    assert len(rows) > 300
    assert all(len(arrivals(r["phases"], int(r["seed"]))) == int(r["n"]) for r in rows)


def test_prefix_counters_are_exact(shared: Path) -> None:
    queries, hits, _ = predict_pulse(shared / "data")
    assert (queries.predicted, hits.predicted) == (queries.measured, hits.measured) == (82_645, 21_264)


@pytest.mark.slow
def test_preemptions_of_the_watermark_table(shared: Path) -> None:
    """From the row without a watermark: preemptions within 15 %, throughput within 3 %, and the best setting."""
    assert table_of_document(shared / "data/measured/published/vllm-44594-watermark.md", "watermark")
    errors = {(r.run, r.quantity): r.error for r in predict_watermark(shared / "data")}
    assert max(abs(error) for (_, name), error in errors.items() if name == "preemptions") < 0.15
    assert max(abs(error) for (_, name), error in errors.items() if name == "out tok/s") < 0.03
    assert errors["all rows", "watermark with the best throughput"] == 0

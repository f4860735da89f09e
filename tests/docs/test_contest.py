"""The contest entries of docs/contest.md: reported results, simulated results, and the statements of the page."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from servesim.runs.simulate import simulate

from ..conftest import ROOT

FIGURES_OF_DEBIAS = {
    "5/20, X 2": 886.79, "5/30, X 2": 838.28, "5/50, X 2": 798.23, "5/100, X 2": 809.31, "1/50, X 2": 805.01,
    "50/50, X 2": 805.45,
}  # fmt: skip


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("contest_table", ROOT / "tools" / "contest_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tool = load_tool()
ENTRIES: dict[str, dict[str, Any]] = {
    entry["name"]: entry for entry in yaml.safe_load(Path(tool.ENTRIES).read_text(encoding="utf-8"))
}


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, float]]:
    return {name: tool.figures_of(entry) for name, entry in ENTRIES.items()}


def test_the_reported_results_are_those_of_the_teams() -> None:
    debias = {e["setting"]: e["reported"] for e in ENTRIES.values() if e.get("team") == "debias_world2"}
    assert debias == FIGURES_OF_DEBIAS
    assert ENTRIES["yyds"]["reported"] == 839
    assert ENTRIES["xidian-2048"]["set"]["engine"]["num_blocks"] == 2048
    for entry in ENTRIES.values():
        has_result = "reported" in entry or "reported_change" in entry
        assert has_result == ("team" in entry) == ("source" in entry)
        assert entry.get("than", "baseline") in ENTRIES


@pytest.mark.slow
def test_entries_with_published_settings_are_within_2_percent(figures: dict[str, dict[str, float]]) -> None:
    known = [entry for entry in ENTRIES.values() if "reported" in entry and "assumed" not in entry]
    assert len(known) == 14
    for entry in known:
        assert figures[entry["name"]]["makespan"] == pytest.approx(entry["reported"], rel=0.02), entry["name"]


@pytest.mark.slow
def test_the_statements_of_the_page_hold(figures: dict[str, dict[str, float]]) -> None:
    def change(name: str, other: str, figure: str = "makespan") -> float:
        return figures[name][figure] - figures[other][figure]

    assert change("debias-50", "baseline", "decode_s") == pytest.approx(-2689, abs=1)
    assert change("introspection-2", "sunflower", "prefill_s") == pytest.approx(-468, abs=1)
    assert change("debias-100", "debias-50") == pytest.approx(-5.5, abs=0.1)
    assert abs(change("grouped", "debias-50")) < 2
    assert change("xidian-2048", "xidian") == 0
    assert abs(change("yyds", "undelayed")) < 1
    assert change("moon", "unsorted") < 0 < change("moon-shortest", "unsorted")
    assert change("urobot-descending", "urobot-unsorted") < 0 < change("urobot-ascending", "urobot-unsorted")


@pytest.mark.slow
def test_figures_are_those_of_a_plain_run(figures: dict[str, dict[str, float]]) -> None:
    run, own = simulate(tool.scenario_of(ENTRIES["debias-50"])), figures["debias-50"]
    assert own["makespan"] == run.measures.makespan
    assert own["prefills"] + own["decodes"] == run.calls
    assert own["prefill_s"] + own["decode_s"] == pytest.approx(run.busy_seconds)


def test_a_row_shows_the_error_and_the_figures_of_its_sentence() -> None:
    entry = {
        "name": "a", "team": "t", "setting": "s", "assumed": "64 slots", "reported": 200, "source": "team", "than": "b",
        "why": "{rows:.0f} instead of {than_rows:.0f} rows save {saved:.0f} s.",
    }  # fmt: skip
    figures = {"a": {"makespan": 210.0, "rows": 60.2, "lost": 3}, "b": {"makespan": 300.0, "rows": 20.0, "lost": 0}}
    row = ["t", "s (assumed: 64 slots)", "200.00 s (team)", "210.0 s, 3 lost", "+5.0 %"]
    assert tool.row_of(entry, figures) == [*row, "60 instead of 20 rows save 90 s."]
    entry["reported_change"] = -100
    del entry["reported"]
    assert tool.row_of(entry, figures)[2:5] == ["-100 s (team)", "210.0 s, 3 lost (-90.0 s)", "+10.0 s"]

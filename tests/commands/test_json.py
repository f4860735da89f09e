"""--json: one JSON document on standard output, with the numbers of the files and of the text."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from servesim.policies import POLICIES
from servesim.study import pilot_runs

from ..study import sweeps
from .running import run_sim


def document(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 0) -> dict[str, Any]:
    """Return the document that a command prints with --json, without NaN."""
    said = run_sim(capsys, *map(str, words), "--json")
    assert said.code == code, said.error

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    result: dict[str, Any] = json.loads(said.out, parse_constant=refuse)
    return result


def cells(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_has_the_numbers_of_summary_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = sweeps.sweep_file(tmp_path, subject_to=["p99_ttft_ms <= 100000"])
    said = run_sim(capsys, "sweep", str(file), "-o", str(tmp_path / "out"), "-j", "1", "--json", "--no-report")
    data, table = json.loads(said.out), cells(tmp_path / "out" / "summary.csv")
    assert "winner: " in said.error or "baseline: " in said.error, "paths are notes"
    assert [row["config"] for row in data["configurations"]] == [int(line["config"]) for line in table]
    assert data["winner"] == int(table[0]["config"]) and data["configurations"][0]["relation"] == "best"
    for row, line in zip(data["configurations"], table):
        for name, value in {**row["settings"], **row["metrics"]}.items():
            assert ("" if value is None else str(value)) == line[name]
        assert f"{data['objectives'][0]}_difference" in row["metrics"] and "policy.decode_batch" in row["settings"]
    assert data["constraints"] == ["p99_ttft_ms <= 100000"] and data["runs"] == 21


def test_a_sweep_over_rates_has_the_numbers_of_capacity_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"params": {"policy.decode_batch": [2, 8]}, "rates": [2, 4], "subject_to": ["p99_ttft_ms <= 4000"]}
    file = sweeps.sweep_file(tmp_path, **keys)
    words = ("sweep", file, "-o", tmp_path / "out", "-j", "1", "-q", "--no-report", "--replications", "2")
    data, table = document(capsys, *words), cells(tmp_path / "out" / "capacity.csv")
    assert [at["rate"] for at in data["rates"]] == [2, 4]
    assert [(c["config"], c["capacity"]) for c in data["capacities"]] == [
        (int(line["config"]), float(line["capacity"])) for line in table
    ]
    assert all(len(at["configurations"]) == len(table) for at in data["rates"])


def test_a_capacity_has_the_numbers_of_rates_csv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pilot_runs, "MIN_REQUESTS", 200)
    (tmp_path / "base.yaml").write_text(json.dumps(sweeps.base()))
    words = ("capacity", tmp_path / "base.yaml", "-j", "1", "-q", "--no-report")
    bound = ("--subject-to", "p99_ttft_ms <= 2000", "--precision", "20%")
    data = document(capsys, *words, *bound, "-o", tmp_path / "out")
    table, (capacity,) = cells(tmp_path / "out" / "rates.csv"), data["capacities"]
    assert [repr(at["rate"]) for at in capacity["tested"]] == [line["rate"] for line in table]
    assert [repr(at["metrics"]["p99_ttft_ms"]) for at in capacity["tested"]] == [t["p99_ttft_ms"] for t in table]
    assert capacity["capacity"] == max(at["rate"] for at in capacity["tested"] if at["meets"])
    assert data["verdict"] == "capacity" and data["winner"] == 0
    bound = ("--subject-to", "p99_ttft_ms <= 0.001", "--precision", "50%")
    none = document(capsys, *words, *bound, "-o", tmp_path / "none", code=1)
    assert none["verdict"] == "infeasible" and none["winner"] is None and none["capacities"][0]["capacity"] == 0


def test_check_has_the_errors_of_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("calibrate", "check", "ascend910b4-llama2-7b", "--tolerance", "0.0001")
    data, text = document(capsys, *words, code=3), run_sim(capsys, *words).out
    assert data["within_tolerance"] is False and data["held_out_error"]
    for kind, error in data["held_out_error"].items():
        assert f"held-out error  {kind:<10}{error:>7.2%}" in text
    for advice in data["next_measurements"]:
        assert f"  {advice}\n" in text


def test_policies_are_listed_and_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10000")  # no line is wrapped
    data, text = document(capsys, "policies", "list"), run_sim(capsys, "policies").out
    assert {entry["name"] for entry in data["policies"]} == set(POLICIES)
    lines = text.splitlines()
    for key, kind in (("policies", "policy"), ("presets", "preset")):
        for entry in data[key]:
            (line,) = [line for line in lines if line.split()[:2] == [kind, entry["name"]]]
            noun = "recording" if entry["recordings"] == 1 else "recordings"
            assert f"  {entry['version']}, {entry['recordings'] or 'no'} {noun}. {entry['about']}" in line
            title = f"{entry['family']} (not modelled: {entry['not_modelled']})"
            assert title == [line for line in lines[: lines.index(line)] if not line.startswith(" ")][-1]
            assert not entry["validated_against"].startswith("not validated")
    for name in (data["policies"][0]["name"], data["presets"][0]["name"]):
        shown, text = document(capsys, "policies", "show", name), run_sim(capsys, "policies", "show", name).out
        listed = [line.split()[:2] for line in text.splitlines()]
        assert shown["fields"] and all([field["name"], repr(field["value"])] in listed for field in shown["fields"])
        assert f"{shown['policy']}: {shown['about']}\n" in text

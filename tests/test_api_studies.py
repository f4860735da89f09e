"""The Python API: search, compare, check and capacity, and the answers of sweeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import servesim
import yaml
from servesim.cli import main
from servesim.core import BadInput

COST = {"kind": "linear", "prefill": 0.02, "prefill_token": 1e-4, "decode_step": 0.02, "decode_live": 0.001}
BASE: dict[str, Any] = {
    "workload": {
        "requests": 60, "arrivals": {"kind": "poisson", "rate": 5}, "lengths": {"prompt": 100, "output": [20, 120]},
    },
    "policy": {"name": "vllm", "max_num_seqs": 4},
    "engine": {"num_blocks": 256, "max_model_len": 4096},
    "profile": COST,
}  # fmt: skip
WIDE = {**BASE, "policy": {"name": "vllm", "max_num_seqs": 8}}
OWN_POLICY = """
from dataclasses import dataclass
from servesim.policies import POLICIES
@dataclass(frozen=True)
class Mine(POLICIES["llm-serving"]):
    pass
"""


@pytest.fixture(scope="module")
def swept() -> Any:
    """A sweep with a constraint, in which two configurations have the same metrics."""
    params = {"policy.max_num_seqs": [2, 4, 8], "engine.num_blocks": [128, 256]}
    return servesim.sweep(base=BASE, params=params, replications=2, subject_to="p99_ttft_ms <= 8000", indifference="1%")


def command(capsys: pytest.CaptureFixture[str], *words: Any) -> Any:
    """Return what a command prints as JSON."""
    main([*map(str, words), "--json", "-j", "1", "-q"])
    return json.loads(capsys.readouterr().out)


def write(path: Path, tree: Any) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def test_search_finds_the_winner_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optuna")
    keys = {"base": BASE, "params": {"policy.max_num_seqs": [2, 4, 8, 16]}, "trials": 6, "seed": 3}
    ours = servesim.search(keys, replications=2)
    file = write(tmp_path / "search.yaml", keys)
    theirs = command(capsys, "search", file, "--replications", 2, "-o", tmp_path / "out", "--no-report")
    assert ours.verdict == theirs["text"]
    assert ours.table.makespan.tolist() == servesim.load(tmp_path / "out").table.makespan.tolist()
    from_file = servesim.search(file, tmp_path / "again", replications=2)
    assert from_file.table.drop(columns="labels").equals(ours.table.drop(columns="labels"))
    assert (tmp_path / "again" / "best.yaml").is_file()
    more = servesim.search(file, tmp_path / "again", replications=2, trials=7, resume=True)
    assert more.summary.run_count >= from_file.summary.run_count


def test_compare_gives_the_numbers_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write(tmp_path / "a.yaml", BASE), write(tmp_path / "b.yaml", WIDE)]
    theirs = command(capsys, "compare", *files, "--replications", 3)
    ours = servesim.compare(BASE, WIDE, replications=3)
    named = theirs["verdict"].replace(str(files[1]), "B")  # a mapping has no file name
    assert ours.verdict == named
    for metric, row in theirs["metrics"].items():
        columns = ["a", "b", "difference", "half_width", "relative", "relative_low", "relative_high", "pairs"]
        assert ours.table.loc[metric, columns].tolist() == [row[name] for name in columns]
    mixed = servesim.compare(files[0], WIDE, replications=3, metrics="makespan")
    assert list(mixed.table.index) == ["makespan"]
    assert mixed.pairs("makespan").b.mean() == pytest.approx(ours.table.b["makespan"])
    changed = servesim.compare(BASE, WIDE, replications=2, settings={"policy.max_num_seqs": 8})
    assert changed.verdict == "A and B are the same in every metric."


def test_check_gives_the_numbers_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write(tmp_path / "a.yaml", BASE), write(tmp_path / "b.yaml", WIDE)]
    bounds = ["mean_ttft_ms <= 1", "makespan <= 1.5 * baseline"]
    options = [word for bound in bounds for word in ("--subject-to", bound)]
    theirs = command(capsys, "check", files[1], "--baseline", files[0], *options, "--replications", 3)
    ours = servesim.check(WIDE, baseline=BASE, subject_to=bounds, replications=3)
    assert ours.verdict == theirs["verdict"] == "broken" and ours.text == theirs["text"]
    assert ours.as_json()["constraints"] == theirs["constraints"]
    assert [row.verdict for row in ours.rows] == ["broken", "met", "met"]
    equal = servesim.check(files[1], baseline=BASE, subject_to="makespan <= 1", settings={"policy.max_num_seqs": 6})
    assert equal.rows[0].change is not None and equal.rows[0].change.outcome == "the same", "settings apply to both"
    assert servesim.check(BASE, subject_to="makespan <= 1e9", intervals=False).rows[0].value.n == 10


def test_compare_takes_results_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = servesim.run(BASE), servesim.run(WIDE)
    both = servesim.compare(a, b)
    assert both.table.paired_by["mean_ttft_ms"] == "batches"
    assert both.table.difference["mean_ttft_ms"] == pytest.approx(b.metrics["mean_ttft_ms"] - a.metrics["mean_ttft_ms"])
    assert main(["run", str(write(tmp_path / "b.yaml", WIDE)), "-o", str(tmp_path / "run"), "-q"]) == 0
    capsys.readouterr()
    assert servesim.compare(a, tmp_path / "run").table.equals(both.table)
    with pytest.raises(BadInput, match="b: expected a file, a folder, a mapping of scenario keys, or the result"):
        servesim.compare(a, 5)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"b: policy\.max_seqs: unknown key of vllm"):
        servesim.compare(BASE, {**BASE, "policy": {"name": "vllm", "max_seqs": 3}})
    with pytest.raises(BadInput, match="replications: expected at least 1"):
        servesim.compare(BASE, WIDE, replications=0)
    with pytest.raises(BadInput, match="metrics: no metric 'speed'"):
        servesim.compare(a, b, metrics=["speed"])


def test_configurations_of_a_sweep_are_compared(swept: Any) -> None:
    winner = swept.compare()
    metric = "mean_e2el_ms"
    assert winner.table.difference[metric] == pytest.approx(swept.table[f"{metric}_difference"][swept.winner])
    assert servesim.compare(swept, swept).verdict == "A and B are the same in every metric."
    assert swept.compare(0, base=swept.winner).table.difference["makespan"] > 0
    with pytest.raises(BadInput, match="configuration 9: expected a number from 0 to 5"):
        swept.compare(9)


def test_capacity_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bounds = ["p99_ttft_ms <= 3000", "p95_tpot_ms <= 60"]
    file = write(tmp_path / "base.yaml", BASE)
    words = [word for bound in bounds for word in ("--subject-to", bound)]
    theirs = command(capsys, "capacity", file, *words, "--precision", "20%", "--no-report", "-o", tmp_path / "theirs")
    ours = servesim.capacity(file, tmp_path / "out", subject_to=bounds, precision=0.2)
    assert ours.rate == theirs["capacities"][0]["capacity"]
    tested = theirs["capacities"][0]["tested"]
    curve = ours.curves.set_index("rate")
    assert curve.index.tolist() == [at["rate"] for at in tested]
    assert curve.p99_ttft_ms.tolist() == [at["metrics"]["p99_ttft_ms"] for at in tested]
    assert curve.meets[ours.rate] and not curve.meets[curve.index > ours.rate].any()
    for name in ("runs.jsonl", "rates.csv", "capacity.csv", "best.yaml"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    at_rate = servesim.run(ours.scenario())
    assert at_rate.metrics["p99_ttft_ms"] == pytest.approx(curve.p99_ttft_ms[ours.rate])
    text = f"Capacity: meets p99_ttft_ms <= 3000, p95_tpot_ms <= 60 up to {ours.rate:g} req/s; at "
    assert ours.verdict.startswith(text) and repr(ours).startswith("RateSweepResult(base: 1 configuration at ")
    again = servesim.capacity(file, tmp_path / "out", subject_to=bounds, precision=0.2, resume=True)
    loaded = servesim.load(tmp_path / "out")
    assert again.verdict == ours.verdict == loaded.verdict and loaded.curves.equals(ours.curves)
    assert (tmp_path / "out/best.yaml").is_file()


def test_sweep_exposes_constraints_and_the_table_of_two_parameters(swept: Any) -> None:
    assert swept.constraints == ["p99_ttft_ms <= 8000"]
    assert swept.verdict.startswith("Winner: max_num_seqs=8: mean end-to-end latency ")
    assert swept.table.feasible.sum() == 2 and (swept.table[~swept.table.feasible].violation > 0).all()
    assert swept.table.relation.tolist().count("equal") == 1
    table = swept.knob_table("engine.num_blocks", "max_num_seqs", "mean_ttft_ms")
    assert list(table.index) == [128, 256] and list(table.columns) == [2, 4, 8]
    rows = swept.table.set_index(["engine.num_blocks", "policy.max_num_seqs"]).mean_ttft_ms
    assert all(table.loc[key] == value for key, value in rows.items())
    with pytest.raises(BadInput, match="nothing: expected a parameter of the sweep"):
        swept.knob_table("nothing")


def test_results_are_exported_to_a_server(swept: Any) -> None:
    assert "--max-num-seqs 8" in swept.export("vllm", model="llama")
    assert "--max-num-seqs 4" in swept.export("vllm", config=0)
    assert "--max-num-seqs 4" in servesim.run(BASE).export("vllm")
    with pytest.raises(BadInput, match="server 'orca': expected one of vllm, sglang, mindie, llm-serving"):
        swept.export("orca")
    with pytest.raises(BadInput, match="policy vllm: only sglang policies"):
        swept.export("sglang")

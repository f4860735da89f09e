"""`engine.sampling` on the command line: runs, sweeps and replays with another selection of tokens."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.costs.device_profile import write_profile
from servesim.costs.linear import LinearCost

from ..calibrate.device.kbk_host import kbk_python
from .running import run_sim

COST = LinearCost(base=2e-3, prefill_token=2e-5, decode_row=1e-4)
TERMS = {"host": {"step": 1e-3, "row": 2e-4}, "ops": {"step": 1e-3, "row": 0.0}}
VARIANTS = {"engine.sampling": ["host", "ops"]}
WORKLOAD = {"requests": 16, "arrivals": {"kind": "poisson", "rate": 200}, "lengths": {"prompt": 20, "output": [5, 15]}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a profile that was measured with sampling on the host, and a scenario."""
    write_profile(tmp_path / "profile", {"name": "known", "sampling": {"used": "host", "terms": TERMS}}, COST)
    write_profile(tmp_path / "old", {"name": "old"}, COST)
    write(tmp_path / "scenario.yaml", scenario(tmp_path))
    return tmp_path


def scenario(folder: Path, **engine: Any) -> dict[str, Any]:
    policy = {"name": "vllm", "max_num_seqs": 8}
    return {"workload": WORKLOAD, "policy": policy, "engine": engine, "profile": str(folder / "profile")}


def write(path: Path, tree: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return str(path)


def test_a_sweep_ranks_the_variants_and_its_winner_can_be_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = {"base": scenario(folder, sampling="host"), "params": VARIANTS, "objectives": ["makespan"]}
    out = folder / "sweep"
    said = run_sim(capsys, "sweep", write(folder / "sweep.yaml", sweep), "-o", str(out), "--quiet", "-j", "1")
    assert said.code == 0, said.error
    rows = list(csv.DictReader((out / "summary.csv").open(encoding="utf-8")))
    assert [row["engine.sampling"] for row in rows] == ["ops", "host"]
    best = yaml.safe_load((out / "best.yaml").read_text(encoding="utf-8"))
    assert best["engine"]["sampling"] == "ops"
    assert run_sim(capsys, "run", str(out / "best.yaml"), "-o", str(folder / "run")).code == 0
    assert json.loads((folder / "run" / "result.json").read_text(encoding="utf-8"))["sampling"] == "ops"


def test_a_replay_on_the_fake_backend_takes_the_time_of_the_variant(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    makespans = {}
    for name in ("host", "ops"):
        out = folder / name
        options = ["--set", f"engine.sampling={name}", "--backend", "fake", "--quiet", "-o", str(out)]
        said = run_sim(capsys, "replay", str(folder / "scenario.yaml"), *options)
        assert said.code == 0, said.error
        sides = [json.loads((out / side / "result.json").read_text(encoding="utf-8")) for side in ("sim", "live")]
        assert [side["sampling"] for side in sides] == [name, name]
        assert sides[0]["makespan"] == pytest.approx(sides[1]["makespan"], rel=0.02)
        makespans[name] = sides[1]["makespan"]
    assert makespans["ops"] < 0.95 * makespans["host"]


def test_validate_checks_the_variant_against_the_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(folder / "good.yaml", scenario(folder, sampling="ops"))
    bad = write(folder / "bad.yaml", scenario(folder, sampling="mint"))
    assert run_sim(capsys, "config", "validate", good).code == 0
    said = run_sim(capsys, "config", "validate", bad)
    assert said.code == 2
    assert "engine.sampling: profile known has no time of mint" in said.error


@pytest.mark.slow
def test_a_replay_simulates_the_variant_of_the_backend(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On torch, the option of the backend says what runs; the profile was measured with another variant."""
    pytest.importorskip("torch", reason="torch is not installed: pip install '.[torch]'")
    section = {"used": "device", "terms": {"host": TERMS["host"], "device": TERMS["ops"]}}
    write_profile(folder / "profile", {"name": "known", "model": "micro", "sampling": section}, COST)
    options = ["--backend", "torch", "--option", "device=cpu", "--option", "sampling=host", "--option", "threads=1"]
    out = folder / "replay"
    said = run_sim(capsys, "replay", str(folder / "scenario.yaml"), *options, "--limit", "4", "--quiet", "-o", str(out))
    assert said.code == 0, said.error
    simulated, live = (json.loads((out / side / "result.json").read_text()) for side in ("sim", "live"))
    assert (simulated["sampling"], live["backend"]["sampling"]) == ("host", "host")


@pytest.mark.slow
def test_scenarios_with_other_variants_run_on_workers_of_their_own(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install '.[torch]'")
    section = {"used": "device", "terms": {"host": TERMS["host"], "device": TERMS["ops"]}}
    write_profile(folder / "profile", {"name": "known", "model": "micro", "sampling": section}, COST)
    variants = {"engine.sampling": ["host", "device"]}
    sweep = {"base": scenario(folder, sampling="host"), "params": variants, "objectives": ["makespan"]}
    out = str(folder / "sweep")
    assert run_sim(capsys, "sweep", write(folder / "sweep.yaml", sweep), "-o", out, "--quiet", "-j", "1").code == 0
    options = ["--backend", "torch", "--option", "device=cpu", "--option", "threads=1", "--limit", "4", "--quiet"]
    said = run_sim(capsys, "replay", "--from", out, "--top", "2", *options, "-o", out + "-live")
    assert said.code == 0, said.error
    found = {path.parent.name: json.loads(path.read_text()) for path in Path(out + "-live").glob("live/*/result.json")}
    used = {name: result["backend"]["sampling"] for name, result in found.items()}
    assert used == {"rank1": "device", "rank2-baseline": "host"}


@pytest.mark.kbk
@pytest.mark.timeout(1800)
def test_a_probe_on_mindspore_measures_both_variants_and_a_sweep_ranks_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = ["calibrate", "probe", "--backend", "kbk", "--worker-python", kbk_python(), "--model", "micro", "--quiet"]
    sizes = ["--max-rows", "4", "--max-tokens", "64", "--max-seq-len", "128"]
    sizes += ["--host-blocks", "0", "--num-blocks", "64"]
    out = folder / "probed"
    said = run_sim(capsys, *probe, *sizes, "--budget", "20", "--precision", "20%", "-o", str(out))
    assert said.code == 0, said.error
    checked = run_sim(capsys, "calibrate", "check", str(out)).out
    times = dict(re.findall(r"^  (host|ops)\b.* (\d+\.\d+)$", checked, re.MULTILINE))
    assert set(times) == {"host", "ops"}
    assert all(0 < float(ms) < 1000 for ms in times.values())
    base = {**scenario(folder, sampling="host"), "profile": str(out)}
    file = write(folder / "sweep.yaml", {"base": base, "params": VARIANTS, "objectives": ["mean_tpot_ms"]})
    assert run_sim(capsys, "sweep", file, "-o", str(folder / "sweep"), "--quiet", "-j", "1").code == 0
    rows = list(csv.DictReader((folder / "sweep" / "summary.csv").open(encoding="utf-8")))
    terms = yaml.safe_load((out / "profile.yaml").read_text(encoding="utf-8"))["sampling"]["terms"]
    cheapest = min(terms, key=lambda name: terms[name]["step"] + 4 * terms[name]["row"])
    assert rows[0]["engine.sampling"] == cheapest


def test_tune_needs_a_profile_of_the_same_variant(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = {"policy.max_num_seqs": [4, 8]}
    for base, keys, error in (
        (scenario(folder, sampling="ops"), params, "sim tune needs a profile that was measured with ops, got known"),
        (scenario(folder), VARIANTS, "params: engine.sampling: sim tune measures on one"),
    ):
        file = write(folder / "tune.yaml", {"base": base, "params": keys, "objectives": ["makespan"]})
        said = run_sim(capsys, "tune", file, "--backend", "fake", "-o", str(folder / "tuned"), "--quiet")
        assert said.code == 2, said
        assert error in said.error
        assert said.error.count("\n") == 1

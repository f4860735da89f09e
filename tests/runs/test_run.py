"""`sim run`: written files, same bytes for the same seed, user policies, presets."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.cli import main
from servesim.core.fields import policy_fields
from servesim.policies import POLICIES
from servesim.policies.llm_serving.config_file import from_llm_serving, to_llm_serving

SCENARIO = """
workload: {contest: {X: 20, T: 3}}
policy: {name: llm-serving, decode_batch: 8, prefill_batch: 2}
engine: {num_blocks: 24, block_size: 16}
profile: {prefill: 0.02, prefill_token: 0.0005, decode_step: 0.02, decode_row: 0.001, context: 0.000002}
seed: 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with a scenario in it."""
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(folder: Path) -> None:
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert main(["run", "scenario.yaml", "--seed", seed, "-o", name, "--decisions", f"{name}/log.jsonl"]) == 0
    for file in ("requests.csv", "result.json", "log.jsonl"):
        assert (folder / "a" / file).read_bytes() == (folder / "b" / file).read_bytes()
        assert (folder / "a" / file).read_bytes() != (folder / "c" / file).read_bytes()


def test_hold_changes_no_byte_of_the_results(folder: Path) -> None:
    assert main(["run", "scenario.yaml", "-o", "forwarded"]) == 0
    assert main(["run", "scenario.yaml", "-o", "single"]) == 0
    assert main(["run", "scenario.yaml", "-o", "logged", "--decisions", "log.jsonl"]) == 0
    requests = (folder / "forwarded" / "requests.csv").read_bytes()
    assert (
        requests
        == (folder / "single" / "requests.csv").read_bytes()
        == (folder / "logged" / "requests.csv").read_bytes()
    )


def test_time_breakdown_adds_up_to_the_latency(folder: Path) -> None:
    settings = ["--set", "engine.front_end={lag: 7, end_lag: true, seconds: 0.03}"]
    assert main(["run", "scenario.yaml", "-o", "out", *settings]) == 0
    table = rows(folder / "out" / "requests.csv")
    assert len(table) == 60
    for line in table:
        parts = ("queued", "prefill", "stalled", "decoding", "swapped", "front_end")
        spent = sum(float(line[part]) for part in parts)
        assert spent == pytest.approx(float(line["finish"]) - float(line["arrival"]), abs=1e-9)
    assert sum(int(line["preemptions"]) for line in table) > 0, "the pool is small enough for preemptions"


def test_front_end_delays_a_request_before_the_scheduler_sees_it(folder: Path) -> None:
    """An idle server, 0.5 s per call: sent at 1 s, prefilled from 1.25 to 1.75 s, one decode to 2.25 s."""
    (folder / "one.csv").write_text("arrival,prompt,output\n1.0,4,2\n")
    (folder / "outside").mkdir()
    (folder / "outside" / "profile.yaml").write_text("front_end: {seconds: 0.25}\ncost: {base: 0.5}\n")
    for profile, settings in (("outside", []), ('{"base": 0.5}', ["--set", "engine.front_end.seconds=0.25"])):
        options = ["--trace", "one.csv", "--set", f"profile={profile}", "--set", "policy.name=vllm", *settings]
        assert main(["run", *options, "-o", f"out-{len(settings)}"]) == 0
        (line,) = rows(folder / f"out-{len(settings)}" / "requests.csv")
        assert [float(line[name]) for name in ("first_token", "finish", "queued", "front_end")] == [1.75, 2.25, 0, 0.25]


def test_results_have_the_keys_and_units_of_vllm_bench(folder: Path) -> None:
    assert main(["run", "scenario.yaml", "-o", "out", "--goodput", "ttft:2000", "e2el:60000"]) == 0
    result = json.loads((folder / "out" / "result.json").read_text())
    table = rows(folder / "out" / "requests.csv")
    ttft = [float(line["first_token"]) - float(line["arrival"]) for line in table]
    assert result["mean_ttft_ms"] == pytest.approx(1e3 * sum(ttft) / len(ttft))
    assert result["completed"] == 60
    assert result["total_output_tokens"] == sum(int(line["output"]) for line in table)
    assert result["request_throughput"] == pytest.approx(60 / result["duration"])
    good = sum(t <= 2 for t in ttft)
    assert result["request_goodput"] == pytest.approx(good / result["duration"])
    tpots = [
        (float(r["finish"]) - float(r["first_token"])) / (int(r["output"]) - 1) for r in table if int(r["output"]) > 1
    ]
    assert result["mean_tpot_ms"] == pytest.approx(1e3 * sum(tpots) / len(tpots))


def test_pooled_gaps_are_the_gaps_between_logged_tokens(folder: Path) -> None:
    """The decision log shows the tokens of each step; the gaps between them are the inter-token latencies."""
    assert main(["run", "scenario.yaml", "-o", "out", "--decisions", "log.jsonl"]) == 0
    last: dict[int, float] = {}
    gaps: list[float] = []
    for step in read_log(folder / "log.jsonl"):
        for id, _ in step["chunks"]:  # llm-serving runs whole prompts, so every chunk of a batch gives a token
            if id in last:
                gaps.append(step["t_end"] - last[id])
            last[id] = step["t_end"]
    result = json.loads((folder / "out" / "result.json").read_text())
    assert result["mean_itl_ms"] == pytest.approx(1e3 * sum(gaps) / len(gaps), rel=1e-9)
    assert result["p99_itl_ms"] == pytest.approx(1e3 * percentile(gaps, 99), rel=1e-9)


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    low = int(place)
    return ordered[low] + (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]) * (place - low)


def test_manifest_is_enough_to_repeat_the_run(folder: Path) -> None:
    assert main(["run", "scenario.yaml", "-o", "out", "--set", "policy.decode_batch=5"]) == 0
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    (folder / "again.yaml").write_text(yaml.safe_dump(manifest["scenario"]))
    assert main(["run", "again.yaml", "-o", "again"]) == 0
    assert (folder / "out" / "requests.csv").read_bytes() == (folder / "again" / "requests.csv").read_bytes()


def test_livelock_is_printed_and_the_command_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,100,2\n0,5,2\n")
    command = ["run", "scenario.yaml", "--trace", "trace.csv", "--set", "engine.num_blocks=5", "-o", "out"]
    assert main(command) == 1
    assert "stuck at t=0 s: no request runs and no request will arrive (requests 0, 1)" in capsys.readouterr().out
    assert main([*command, "--set", "engine.reject_oversized=always"]) == 0
    assert rows(folder / "out" / "requests.csv")[0]["outcome"] == "refused"


def test_client_timeouts_are_counted_as_lost(folder: Path) -> None:
    assert main(["run", "scenario.yaml", "-o", "out", "--set", "engine.client_timeout=1.5"]) == 0
    result = json.loads((folder / "out" / "result.json").read_text())
    lost = [line for line in rows(folder / "out" / "requests.csv") if line["outcome"] == "lost"]
    assert result["outcomes"]["lost"] == len(lost) > 0
    assert all(float(line["finish"]) == pytest.approx(float(line["arrival"]) + 1.5) for line in lost)


def test_llm_serving_configuration_is_a_scenario(folder: Path) -> None:
    (folder / "server.yaml").write_text(
        "model_config: {decode_batch_size: [8], seq_length: [512], page_attention: True, prefill_batch_size: [4]}\n"
        "pa_config: {num_blocks: 128, block_size: 16, decode_seq_length: 512}\n"
        "serving_config: {server_port: 8835}\n"
    )
    assert main(["run", "server.yaml", "-X", "20", "-T", "3", "-o", "out"]) == 0
    scenario = json.loads((folder / "out" / "manifest.json").read_text())["scenario"]
    assert scenario["policy"] == {"name": "llm-serving", "decode_batch": 8}
    assert scenario["engine"]["num_blocks"] == 128
    assert scenario["engine"]["prefill_buckets"] == [512]
    times = dict.fromkeys(("seconds", "per_request", "per_token"))
    assert scenario["engine"]["front_end"] == {"lag": 7, "end_lag": True, **times}


@pytest.mark.parametrize(
    ("batching", "paging", "strategy"),
    [
        ("continuous", True, None),
        ("continuous", False, "continuous"),
        ("static", False, "static"),
        ("static", True, "static-paged"),
    ],
)
def test_all_strategies_of_llm_serving_are_known(batching: str, paging: bool, strategy: str | None) -> None:
    model = {"decode_batch_size": [8], "batching_strategy": batching, "page_attention": paging}
    scenario = from_llm_serving({"model_config": model, "pa_config": {}}, "server.yaml")
    assert scenario["policy"].get("strategy") == strategy
    written = to_llm_serving(scenario["policy"], scenario["engine"])["model_config"]
    assert (written["batching_strategy"], written["page_attention"]) == (batching, paging)


MINE = '''
from dataclasses import dataclass
from servesim.core import Chunk, Plan, Policy, View

@dataclass(frozen=True)
class OneByOne(Policy):
    """Serve one request at a time."""
    def decide(self, view: View) -> Plan:
        if view.running:
            return Plan(decode=True)
        return Plan(chunks=[Chunk(r, r.pending) for r in list(view.waiting)[:1]])
'''


def test_policy_in_a_user_file_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(MINE)
    assert main(["run", "scenario.yaml", "--policy", "mine.py:OneByOne", "--decisions", "log.jsonl"]) == 0
    assert all(len(step["running"]) <= 1 for step in read_log(folder / "log.jsonl"))
    assert main(["policies", "show", "mine.py:OneByOne"]) == 0
    assert "Serve one request at a time." in capsys.readouterr().out
    assert main(["run", "scenario.yaml", "--policy", "mine.py:Missing"]) == 2


@pytest.mark.parametrize("name", POLICIES)
def test_every_field_of_a_policy_has_help(name: str) -> None:
    known = policy_fields(POLICIES[name])
    assert set(known) == set(POLICIES[name].__dataclass_fields__)
    assert all(field.help for field in known.values())


def test_session_requests_wait_for_the_previous_response(folder: Path) -> None:
    (folder / "trace.csv").write_text(
        "arrival_s,prompt_tokens,output_tokens,id,follows,think_time_s\n0,5,3,one,,\n0,5,3,two,one,2.5\n0,5,3,three,two,1\n"
    )
    assert main(["run", "scenario.yaml", "--trace", "trace.csv", "-o", "out"]) == 0
    one, two, three = rows(folder / "out" / "requests.csv")
    assert float(two["arrival"]) == pytest.approx(float(one["finish"]) + 2.5)
    assert float(three["arrival"]) == pytest.approx(float(two["finish"]) + 1)


def test_requests_csv_ends_with_the_latencies_of_finished_requests(folder: Path) -> None:
    """Seconds, whose means are those of result.json; a lost request has none, a single token has no tpot."""
    (folder / "three.csv").write_text("arrival,prompt,output\n0,4,3\n0.25,4,1\n0.5,4,40\n")
    options = ["--policy", "vllm", "--set", "profile={base: 0.5}", "--set", "engine.client_timeout=8"]
    assert main(["run", "--trace", "three.csv", *options, "-o", "out"]) == 0
    table, result = rows(folder / "out" / "requests.csv"), json.loads((folder / "out" / "result.json").read_text())
    assert list(table[0])[-4:] == ["outcome", "ttft", "tpot", "e2el"]
    assert [line["outcome"] for line in table] == ["finished", "finished", "lost"]
    for name in ("ttft", "tpot", "e2el"):
        values = [float(line[name]) for line in table if line[name]]
        assert len(values) == (1 if name == "tpot" else 2) and table[2][name] == ""
        assert 1e3 * sum(values) / len(values) == pytest.approx(result[f"mean_{name}_ms"], rel=1e-12)


def test_a_folder_of_an_old_version_without_latencies_is_read(folder: Path) -> None:
    from servesim.frames.run import result_of_data
    from servesim.runs.run_folder import read_run

    assert main(["run", "scenario.yaml", "-o", "out"]) == 0
    new = result_of_data(read_run(folder / "out")).requests
    path = folder / "out" / "requests.csv"
    path.write_text("".join(",".join(line.split(",")[:-3]) + "\n" for line in path.read_text().splitlines()))
    assert result_of_data(read_run(folder / "out")).requests.equals(new)
    assert new.e2el.notna().all()


def test_metric_percentiles_are_printed_and_stored(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "scenario.yaml", "-o", "out", "--metric-percentiles", "50,95,99.9"]) == 0
    text, result = capsys.readouterr().out, json.loads((folder / "out" / "result.json").read_text())
    for name in ("ttft", "tpot", "itl", "e2el"):
        shown = [line.split()[0] for line in text.splitlines() if f" {name.upper()} (ms):" in line]
        assert shown == ["Mean", "Median", "P50", "P95", "P99.9"]
        assert result[f"p95_{name}_ms"] <= result[f"p99_{name}_ms"] <= result[f"p99.9_{name}_ms"]
        assert f"{result[f'p99.9_{name}_ms']:.2f}" in text

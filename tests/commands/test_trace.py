"""`sim trace` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from servesim.cli import main
from servesim.config.scenario import scenario_from
from servesim.runs.simulate import load_trace
from servesim.traces.export import EXPORTS
from servesim.traces.read.formats import FORMATS

from .running import run_sim

VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,120,30\n0.5,64,12\n1.25,400,80\n"
Output = pytest.CaptureFixture[str]


def written(folder: Path, text: str, name: str = "trace.csv") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_convert_reads_what_it_wrote(tmp_path: Path, capsys: Output) -> None:
    first, second = str(tmp_path / "a.jsonl.gz"), str(tmp_path / "b.csv.gz")
    assert main(["trace", "convert", written(tmp_path, VIDUR), "--to", "mooncake", "-o", first]) == 0
    assert main(["trace", "convert", first, "-o", second]) == 0
    assert main(["trace", "convert", second]) == 0
    # Mooncake's format needs a hash id per block of 512 tokens.
    assert capsys.readouterr().out.splitlines()[1:] == ["0.0,120,30,0", "0.5,64,12,1", "1.25,400,80,2"]


def test_convert_sorts_renames_cuts_and_scales(tmp_path: Path, capsys: Output) -> None:
    path = written(tmp_path, "t,in,out\n4000,7,8\n1000,5,6\n2000,6,7\n9000,8,9\n")
    columns = ["--column", "arrival=t", "--column", "prompt=in", "--column", "output=out"]
    flags = ["--time-unit", "ms", "--slice", "1:5", "--scale", "2", "--scale-output", "10"]
    assert main(["trace", "convert", path, *columns, *flags]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "arrival_s,prompt_tokens,output_tokens,id",
        "0.0,5,60,1",
        "0.5,6,70,2",
        "1.5,7,80,0",
    ]
    assert said.err == f"sim: {path}: rows were not in order of arrival: sorted\n"


def test_every_format_is_listed(capsys: Output) -> None:
    assert main(["trace", "convert", "--list"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert listed == set(FORMATS) | set(EXPORTS)


def test_synth_generates_the_contest_workload(tmp_path: Path, capsys: Output) -> None:
    path = str(tmp_path / "contest.csv")
    assert main(["trace", "synth", "-X", "150", "-T", "10", "--seed", "0", "-o", path]) == 0
    assert Path(path).read_text().splitlines()[:4][0] == "arrival_s,prompt_tokens,output_tokens"
    assert [row.split(",")[0] for row in Path(path).read_text().splitlines()[1:4]] == ["0.0", "0.01", "0.021"]


def test_synth_takes_a_workload_from_a_file_and_from_settings(tmp_path: Path, capsys: Output) -> None:
    section = "requests: 3\narrivals: {kind: constant, rate: 2}\nlengths: {prompt: 5, output: 6}\n"
    scenario = "workload:\n" + "".join(f"  {line}\n" for line in section.splitlines()) + "seed: 4\n"
    expected = "arrival_s,prompt_tokens,output_tokens\n0.0,5,6\n0.5,5,6\n1.0,5,6\n"
    settings = ["requests=3", "arrivals.kind=constant", "arrivals.rate=2", "lengths.prompt=5", "lengths.output=6"]
    for options in (
        [written(tmp_path, section, "w.yaml")],
        [written(tmp_path, scenario, "s.yaml")],
        [part for setting in settings for part in ("--set", setting)],
    ):
        assert main(["trace", "synth", *options]) == 0
        assert capsys.readouterr().out == expected


def test_inspect_prints_a_table_or_json(tmp_path: Path, capsys: Output) -> None:
    path = written(tmp_path, VIDUR)
    assert main(["trace", "inspect", path]) == 0
    assert "rate                       1.6 requests/s" in capsys.readouterr().out
    assert main(["trace", "inspect", path, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert (metrics["requests"], metrics["rate"], metrics["output"]["max"]) == (3, 1.6, 80.0)


def test_inspect_prints_the_reuse_for_the_block_size_of_the_engine(tmp_path: Path, capsys: Output) -> None:
    rows = [(0, 1100, [0, 1, 2]), (1000, 1500, [0, 1, 3]), (2000, 40, [9])]
    text = "".join(
        json.dumps({"timestamp": t, "input_length": n, "output_length": 1, "hash_ids": ids}) + "\n"
        for t, n, ids in rows
    )
    path = written(tmp_path, text)
    assert main(["trace", "inspect", path, "--block-size", "512"]) == 0
    printed = capsys.readouterr().out
    assert "hash ids                   512 tokens each" in printed
    assert "blocks seen before         50.0% of 4 prompt blocks of 512 tokens" in printed
    assert printed.splitlines()[-1].split() == ["unlimited", f"{1024 / 2640:.1%}"]
    assert main(["trace", "inspect", path, "--json"]) == 0
    prefix = json.loads(capsys.readouterr().out)["prefix"]
    assert (prefix["block_size"], prefix["blocks"], prefix["seen_blocks"]) == (16, 68 + 93 + 2, 64 / 163)
    assert prefix["cache_sizes"][-1]["hit_rate"] == prefix["hit_rate"] == 1024 / 2640
    assert main(["trace", "inspect", path, "--block-size", "0"]) == 2
    assert capsys.readouterr().err == "sim: --block-size: expected at least 1 token, got 0\n"


def test_the_user_can_say_that_sessions_are_conversations(tmp_path: Path, capsys: Output) -> None:
    path = written(tmp_path, "prompt_tokens,output_tokens,session\n40,8,s\n60,8,s\n60,8,\n")
    assert main(["trace", "convert", path, "--conversations"]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "prompt_tokens,output_tokens,session_id,content,answer",
        "40,8,s,prompt:0:40,output:0",
        "60,8,s,prompt:0:40 output:0:8 prompt:1:12,output:1",
        "60,8,,,",
    ]
    assert "the prompt of a turn contains the earlier turns and answers of its session" in said.err
    scenario = scenario_from({"trace": {"path": path, "conversations": True}})
    assert [request.content is None for request in load_trace(scenario).requests] == [False, False, True]


def test_the_example_traces_are_results_of_vllm_bench_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    said = run_sim(capsys, "trace", "examples")
    assert (said.code, said.out, said.error) == (0, "vllm-bench-4.json\nvllm-bench-7.json\n", "")
    for name, count in (("vllm-bench-4.json", 80), ("vllm-bench-7.json", 120)):
        described = json.loads(run_sim(capsys, "trace", "inspect", name, "--json").out)
        assert (described["format"], described["requests"]) == ("vllm-bench", count)
    (tmp_path / "vllm-bench-7.json").write_text("mine")
    again = run_sim(capsys, "trace", "examples")
    assert again.code == 2 and len(again.error.splitlines()) == 1
    assert (tmp_path / "vllm-bench-7.json").read_text() == "mine"
    assert run_sim(capsys, "trace", "examples", "-o", "new").out.split() == [
        "new/vllm-bench-4.json",
        "new/vllm-bench-7.json",
    ]


def test_a_trace_without_arrival_times_gets_advice_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """The file of ShareGPT has texts only."""
    monkeypatch.chdir(tmp_path)
    turns = [{"from": "human", "value": "why " * 9}, {"from": "gpt", "value": "so " * 30}]
    (tmp_path / "chats.json").write_text(json.dumps([{"id": str(i), "conversations": turns} for i in range(40)]))
    failed = run_sim(capsys, "run", "--trace", "chats.json", "--set", "trace.rate=5", "-q")
    assert failed.code == 2 and len(failed.error.splitlines()) == 1
    assert failed.error.startswith("sim: chats.json: cannot be scaled to 5 requests/s: all requests arrive at the same")
    workload = failed.error.split("`")[-2]
    assert workload.startswith("workload: {requests: 40, ")
    (tmp_path / "advice.yaml").write_text(f"{workload}\npolicy: vllm-v1\nprofile: h200-llama2-7b\n")
    done = json.loads(run_sim(capsys, "run", "advice.yaml", "--json", "-q").out)
    assert (done["completed"], done["total_input_tokens"]) == (40, 40 * 9)
    assert 40 / 5 / 2 < done["makespan"] < 40 / 5 * 2
    (tmp_path / "texts.yaml").write_text("{trace: chats.json, policy: vllm-v1, profile: h200-llama2-7b}\n")
    failed = run_sim(capsys, "capacity", "texts.yaml", "--subject-to", "p99_ttft_ms <= 500", "-q")
    assert failed.code == 2 and len(failed.error.splitlines()) == 1
    assert "`workload: {requests: 40, arrivals: {kind: poisson, rate: 1.0}, lengths: {kind: trace, " in failed.error

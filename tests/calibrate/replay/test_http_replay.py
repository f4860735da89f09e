"""`sim replay --url`: prompts as the server receives them, and the report about them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Optional

import pytest

pytest.importorskip("aiohttp")
from servesim.calibrate.replay.http_client import warm_up_requests
from servesim.calibrate.replay.verify import MetricRow
from servesim.cli import main
from servesim.core import Request
from servesim.runs.run_folder import read_sent

from ...commands.running import run_sim
from ..client.recording_server import RecordingServer, recording_server
from ..client.test_server_counters import SETTINGS
from ..client.vocabularies import count_llama_tokens
from ..server.serving import ask, gather_bursts, service

BLOCK = 16  # tokens of a block in a prefix cache


def write_trace(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps({"arrival_s": 0.0, "output_tokens": 1, **row}) + "\n" for row in rows))
    return str(path)


def replay(server: RecordingServer, trace: str, api: str, *options: str) -> list[Any]:
    """Run the command and return the prompts that the server received, sorted by length."""
    server.prompts.clear()
    command = ["replay", "--trace", trace, "--url", server.url, "--api", api, "--served-model", "m", "--live-only"]
    assert main([*command, "--quiet", *options]) == 0
    return sorted(server.prompts, key=len)


@pytest.mark.parametrize("api", ["llm-serving", "openai"])
def test_a_second_replay_shares_no_prompt_beyond_one_block_with_the_first(tmp_path: Path, api: str) -> None:
    trace = write_trace(tmp_path, [{"prompt_tokens": 40 + 3 * k} for k in range(20)])
    with recording_server() as server:
        first = replay(server, trace, api)
        second = replay(server, trace, api, "--warm-up", "10")
        assert [len(prompt) for prompt in first] == [40 + 3 * k - (api == "llm-serving") for k in range(20)]
        assert len(first + second) == 50
        beginnings = [tuple(prompt[:BLOCK]) for prompt in first + second]
        assert len(set(beginnings)) == len(beginnings)  # also inside a run, and between a run and its warm-up


def test_prompts_have_the_requested_llama_tokens_at_the_server(tmp_path: Path) -> None:
    lengths = [2, 21, 900, 2000]
    trace = write_trace(tmp_path, [{"prompt_tokens": length} for length in lengths])
    with recording_server() as server:
        prompts = replay(server, trace, "llm-serving")
    assert count_llama_tokens([" ".join(prompt) for prompt in prompts]) == lengths


def test_a_prompt_seed_repeats_the_prompts_and_is_printed_and_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path, [{"prompt_tokens": 50}, {"prompt_tokens": 60}])
    with recording_server() as server:
        first = replay(server, trace, "openai", "-o", str(tmp_path / "out"))
        seed = json.loads((tmp_path / "out" / "live" / "manifest.json").read_text())["prompt_seed"]
        assert f"prompt seed: {seed}\n" in capsys.readouterr().out
        assert replay(server, trace, "openai", "--prompt-seed", seed) == first
        assert replay(server, trace, "openai", "--prompt-seed", seed) == first


def test_a_replay_against_a_server_can_be_verified_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path, [{"prompt_tokens": 50}, {"prompt_tokens": 60}])
    with recording_server() as server:
        command = ["replay", "--trace", trace, "--url", server.url, "--api", "openai", "--served-model", "m"]
        assert main([*command, "--quiet", "-o", str(tmp_path / "out")]) == 0
    replayed = error_rows(capsys.readouterr().out)
    assert len(replayed) > 10
    assert main(["verify", str(tmp_path / "out" / "sim"), str(tmp_path / "out" / "live")]) == 0
    assert error_rows(capsys.readouterr().out) == replayed


def error_rows(printed: str) -> list[str]:
    """Return the printed rows of metrics with an error."""
    return [line for line in printed.splitlines() if "%" in line and line[1:].split(" ")[0].isidentifier()]


def test_prompts_follow_the_hash_ids_of_the_trace(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path, [{"prompt_tokens": 600, "hash_ids": [1, 2]}, {"prompt_tokens": 700, "hash_ids": [1, 3]}]
    )
    with recording_server() as server:
        first, second = replay(server, trace, "openai")
    assert first[:512] == second[:512]  # one id is 512 tokens in this trace
    assert first[512:528] != second[512:528]


CONVERSATION: list[dict[str, Any]] = [
    {"prompt_tokens": 60, "content": [["system", 40], ["a", 20]], "answer": "x", "id": 0},
    {"prompt_tokens": 90, "content": [["system", 40], ["a", 20], ["x", 8], ["b", 22]], "answer": "y", "id": 1},
    {"prompt_tokens": 50, "content": [["system", 40]], "id": 2},
]


def test_the_prompt_of_a_turn_begins_with_the_one_before(tmp_path: Path) -> None:
    """The server sends no token ids: the next prompt cannot contain its answer, and the simulation must know this."""
    with recording_server() as server:
        trace = write_trace(tmp_path, CONVERSATION)
        third, first, second = replay(server, trace, "openai", "-o", str(tmp_path / "out"))
    assert [len(prompt) for prompt in (first, second, third)] == [60, 90, 50]
    assert second[:60] == first and third[:40] == first[:40] and third[40:] != first[40:50]
    sent = read_sent(tmp_path / "out" / "live" / "sent.jsonl")
    assert [request.content and request.content.pieces for request in sent][:2] == [
        [("system", 40), ("a", 20)],
        [("system", 40), ("a", 20), ("x", 8), ("b", 22)],
    ]
    assert all(request.content is not None and request.content.answer is None for request in sent)


def test_the_next_prompt_contains_the_answer_if_the_server_sends_its_token_ids(tmp_path: Path) -> None:
    rows = [CONVERSATION[0], {**CONVERSATION[1], "follows": 0}, CONVERSATION[2]]
    answer = [31_000 + k for k in range(8)]
    with recording_server(token_ids=answer) as server:
        trace = write_trace(tmp_path, rows)
        third, first, second = replay(server, trace, "openai", "-o", str(tmp_path / "out"))
    assert second[:68] == first + answer and len(second) == 90 and set(second[68:]).isdisjoint(answer)
    assert set(first + third).isdisjoint(answer)
    sent = read_sent(tmp_path / "out" / "live" / "sent.jsonl")
    assert [request.content and request.content.answer for request in sent] == ["x", "y", None]


def test_the_address_may_end_as_that_of_openai_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path, [{"prompt_tokens": 50}])
    with service(names=("m",)) as served:
        for end in ("/v1", "/v1/", "/"):  # the name of the model is read from the server
            url = f"http://127.0.0.1:{served.port}{end}"
            said = run_sim(capsys, "replay", "--trace", trace, "--url", url, "--live-only", "--quiet")
            assert said.code == 0, said.error


SHORT = "answers with fewer tokens than asked count as failed"


@pytest.mark.parametrize(
    ("api", "lengths", "code", "line"),
    [
        ("openai", [1, 1], 0, None),
        ("llm-serving", [1, 5, 7], 0, f"{SHORT}: 2, with 2 of 12 tokens"),
        ("openai", [5, 7], 1, f"{SHORT}: 2, with 2 of 12 tokens"),
    ],
    ids=["complete", "some short", "all short"],
)
def test_short_answers_are_failed_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], api: str, lengths: list[int], code: int, line: Optional[str]
) -> None:
    trace = write_trace(tmp_path, [{"prompt_tokens": 50, "output_tokens": length} for length in lengths])
    out = tmp_path / "out"
    with recording_server() as server:  # answers with one token
        options = ["--url", server.url, "--api", api, "--served-model", "m", "--quiet", "-o", out]
        said = run_sim(capsys, "replay", "--trace", trace, *map(str, options))
    assert said.code == code, said.out + said.error
    result = json.loads((out / "live" / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (lengths.count(1), len(lengths) - lengths.count(1))
    assert (SHORT in said.out) == (line is not None)
    if line is not None:
        assert line in said.out
        assert "ignore_eos" in said.out
    assert said.error == ("sim: llm-serving: no request finished\n" if code else "")


def metrics_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the metrics of the only scenario in verify.json."""
    (comparison,) = json.loads((folder / "verify.json").read_text())["comparisons"]
    metrics: dict[str, dict[str, Any]] = comparison["metrics"]
    return metrics


def test_what_a_server_does_not_count_is_not_a_measured_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path, [{"prompt_tokens": 50}, {"prompt_tokens": 60}])
    with recording_server() as server:
        options = ["--url", server.url, "--served-model", "m", "--quiet", "-o", str(tmp_path / "out")]
        said = run_sim(capsys, "replay", "--trace", trace, *options)
    assert said.code == 0
    for metric in ("preemptions", "model_calls"):
        assert metrics_of(tmp_path / "out")[metric]["measured"] is None
    result = json.loads((tmp_path / "out" / "live" / "result.json").read_text())
    unknown = ("preemptions", "model_calls", "busy_s", "host_s", "device_s", "prompt_tokens_computed")
    assert [result[key] for key in unknown] == [None] * len(unknown)
    assert "round trip: " in said.out  # of small requests


def test_preemptions_are_read_from_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = 12
    gather_bursts(monkeypatch, sent, sent)
    engine = {"num_blocks": 21, "block_size": 8}
    policy = {"name": "vllm", "max_num_seqs": 16, "watermark": 0.0}
    trace = write_trace(tmp_path, [{"prompt_tokens": 9, "output_tokens": 40} for _ in range(sent)])
    scenario = tmp_path / "scenario.yaml"
    cost = {"base": 0.003}
    tree = {"trace": trace, "policy": policy, "engine": engine, "profile": {"kind": "linear", **cost}}
    scenario.write_text(json.dumps(tree))
    counted = []
    with service(policy=policy, cost=cost, engine=engine) as served:
        for name in ("first", "second"):  # each counts its own
            url, out = f"http://127.0.0.1:{served.port}", tmp_path / name
            said = run_sim(capsys, "replay", str(scenario), "--url", url, "--quiet", "-o", str(out))
            assert said.code == 0, said.error
            row = metrics_of(out)["preemptions"]
            assert row["simulated"] > 5
            assert row["measured"] > 5
            counted.append(row["measured"])
        assert sum(counted) == json.loads(ask(served, "/serving/state")[1])["preemptions"]


COUNTED = {  # by a server, for two requests
    "vllm:num_preemptions_total": 3.0,
    "vllm:prefix_cache_hits_total": 32.0,
    "vllm:time_to_first_token_seconds_sum": 0.02,
    "vllm:time_to_first_token_seconds_count": 2.0,
    "vllm:e2e_request_latency_seconds_sum": 0.03,
    "vllm:e2e_request_latency_seconds_count": 2.0,
}


def as_metrics(counters: dict[str, float]) -> str:
    """Return the text of /metrics."""
    return "".join(f'{name}{{engine="0",model_name="{{a}} b"}} {value}\n' for name, value in counters.items())


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "with requests of others"])
def test_time_outside_the_server_is_a_part_of_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], others: int
) -> None:
    trace = write_trace(tmp_path, [{"prompt_tokens": 50}, {"prompt_tokens": 60}])

    class CountingServer(RecordingServer):
        def answer(self, body: dict[str, Any]) -> str:
            counted = {name: 7 + value + others * name.endswith("_count") for name, value in COUNTED.items()}
            self.metrics = as_metrics(counted)
            return super().answer(body)

    with recording_server(kind=CountingServer) as server:
        server.metrics, server.delay = as_metrics(dict.fromkeys(COUNTED, 7.0)), 0.3
        options = ["--url", server.url, "--served-model", "m", "--quiet", "-o", str(tmp_path / "out")]
        said = run_sim(capsys, "replay", "--trace", trace, *options)
    assert said.code == 0, said.error
    rows = metrics_of(tmp_path / "out")
    assert rows["preemptions"]["measured"] == 3
    again = run_sim(capsys, "verify", str(tmp_path / "out" / "sim"), str(tmp_path / "out" / "live"))
    assert error_rows(again.out) == error_rows(said.out)
    if others:
        assert "from_http" not in rows["mean_ttft_ms"]
        assert "the server ended 3 requests, 2 of this run" in said.out
        return
    for metric, in_server in (("mean_ttft_ms", 10.0), ("mean_e2el_ms", 15.0)):
        row = rows[metric]
        assert row["measured"] > 300
        assert row["from_http"] == pytest.approx((in_server - row["measured"]) / row["measured"])
    assert "from_http" not in rows["mean_tpot_ms"]
    assert "HTTP" in said.out
    assert f"{100 * rows['mean_ttft_ms']['from_http']:+.2f}%" in said.out
    assert "engine.front_end.seconds" in said.out
    assert "from http" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_a_simulated_front_end_is_no_part_of_the_error(tmp_path: Path) -> None:
    """The part is that of the simulated front end minus the measured one."""
    row = MetricRow("mean_ttft_ms", simulated=40.0, measured=40.0, outside_server=(10.0, 10.0))
    assert row.from_http == 0
    assert MetricRow("mean_ttft_ms", 30.0, 40.0, outside_server=(0.0, 10.0)).from_http == -0.25
    assert MetricRow("mean_ttft_ms", 30.0, 40.0).from_http is None


def test_settings_in_which_the_server_differs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the run, in the comparison, and when the runs are compared again."""
    trace, out = write_trace(tmp_path, [{"prompt_tokens": 50}]), tmp_path / "out"
    settings = ["policy.name=vllm-v1", "policy.enable_prefix_caching=false", "engine.num_blocks=100"]
    options = [word for setting in settings for word in ("--set", setting)]
    with recording_server(models=[{"id": "m", "owned_by": "vllm"}]) as server:
        server.metrics, server.version = SETTINGS.replace("513", "4097"), "0.30.0"
        said = run_sim(capsys, "replay", "--trace", trace, *options, "--url", server.url, "--quiet", "-o", str(out))
        assert said.code == 0, said.error
        live_only = run_sim(capsys, "replay", "--trace", trace, *options, "--url", server.url, "--quiet", "--live-only")
    different = [
        "engine.block_size: the server has 32, but 16 is simulated",
        "engine.num_blocks: the server has 4,096, but 100 is simulated",
        "prefix cache: the server has on, but off is simulated",
        "the server runs vLLM 0.30.0, but the rules of ",
    ]
    assert notes_of(said.error, "sim: warning: ") == different
    assert notes_of(live_only.error, "sim: warning: ") == different
    assert notes_of(said.out, "note: ") == different
    again = run_sim(capsys, "verify", str(out / "sim"), str(out / "live"))
    assert notes_of(again.out, "note: ") == different
    equal = ["engine.block_size=32", "engine.num_blocks=4096", "policy.enable_prefix_caching=true", settings[0]]
    options = [word for setting in (*equal, "policy.version=0.30.0") for word in ("--set", setting)]
    assert main(["run", "--trace", trace, *options, "-o", str(tmp_path / "equal"), "--quiet"]) == 0
    again = run_sim(capsys, "verify", str(tmp_path / "equal"), str(out / "live"))
    assert notes_of(again.out, "note: ") == []


def notes_of(printed: str, mark: str) -> list[str]:
    """Return the marked lines about settings, up to the second version."""
    lines = [line[len(mark) :] for line in printed.splitlines() if line.startswith(mark) and "the server" in line]
    return [re.sub(r"rules of .*", "rules of ", line) for line in lines]


def test_warm_up_requests_are_sent_at_once() -> None:
    requests = [Request(id, 600.0 * id, 5, 40, follows=id - 1 if id else None) for id in range(3)]
    copies = warm_up_requests(requests)
    assert [(copy.arrival, copy.sent, copy.follows, copy.limit) for copy in copies] == [(0.0, 0.0, None, 16)] * 3
    assert requests[2].arrival == 1200.0

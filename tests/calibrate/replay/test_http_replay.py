"""`sim replay --url`: prompts as the server receives them, and the report about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Optional

import pytest

pytest.importorskip("aiohttp")
from servesim.calibrate.replay.http_client import warm_up_requests
from servesim.cli import main
from servesim.core import Request

from ..client.recording_server import RecordingServer, recording_server
from ..client.vocabularies import count_llama_tokens

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


@pytest.mark.parametrize(
    ("added", "line"),
    [
        (0, "prompt tokens: 110 requested, 110 counted by the server\n"),
        (1, "prompt tokens: 110 requested, 112 counted by the server (different in 2 of 2 requests)\n"),
        (None, "prompt tokens: the server does not report how many it counted\n"),
    ],
)
def test_the_report_compares_requested_and_served_prompt_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], added: Optional[int], line: str
) -> None:
    trace = write_trace(tmp_path, [{"prompt_tokens": 50}, {"prompt_tokens": 60}])
    with recording_server(added) as server:
        replay(server, trace, "openai", "-o", str(tmp_path / "out"))
    assert line in capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "live" / "result.json").read_text())
    counted = 0 if added is None else 2
    assert result["prompt_tokens"]["requests_counted"] == counted
    assert result["prompt_tokens"]["served"] == (0 if added is None else 110 + 2 * added)


def test_warm_up_requests_are_sent_at_once() -> None:
    requests = [Request(id, 600.0 * id, 5, 40, follows=id - 1 if id else None) for id in range(3)]
    copies = warm_up_requests(requests)
    assert [(copy.arrival, copy.sent, copy.follows, copy.limit) for copy in copies] == [(0.0, 0.0, None, 16)] * 3
    assert requests[2].arrival == 1200.0

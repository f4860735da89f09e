"""Hits of the prefix cache in results: as real servers counted them, and in metrics, tables and constraints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import servesim
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import Request
from servesim.core.content import content_of_pieces
from servesim.runs.simulate import simulate
from servesim.traces.read.formats import load
from servesim.traces.trace import Trace

from ..commands.running import run_sim

COST = {"prefill": 0.01, "prefill_token": 1e-4, "decode_step": 0.02}


def scenario(blocks: int, size: int = 16, **policy: Any) -> Scenario:
    return scenario_from({
        "policy": {"name": "vllm-v1", **policy}, "engine": {"num_blocks": blocks, "block_size": size}, "profile": COST,
    })  # fmt: skip


def two_equal_prompts() -> Trace:
    requests = [
        Request(id, 10.0 * id, 100, 4, content=content_of_pieces([("system", 80), (f"own {id}", 20)]))
        for id in range(2)
    ]
    return Trace(requests, "test", "synth")


def test_queries_and_hits_are_those_of_a_real_server(shared: Path) -> None:
    """vLLM 0.13 on an A6000: six pulses of 50 requests; its counters ended at these numbers."""
    trace = load(str(shared / "data" / "measured" / "llmservingsim-ispass26" / "workloads" / "pulse.csv.gz"))
    result = simulate(scenario(13_843, max_num_seqs=128), trace).result()
    assert (result["prefix_cache_queries"], result["prefix_cache_hits"]) == (82_645, 21_264)
    assert round(result["prefix_hit_rate"], 4) == 0.2573


@pytest.mark.slow
def test_an_unlimited_cache_hits_the_share_of_mooncake_tokens_that_the_trace_repeats(shared: Path) -> None:
    trace = load(str(shared / "data" / "traces" / "mooncake_conversation.csv.gz"))
    result = simulate(scenario(500_000, 512, max_num_batched_tokens=8192), trace).result()
    known: set[int] = set()
    repeated = 0
    for request in trace.requests:
        new = [id not in known for id in request.content.names]
        hits = new.index(True) if True in new else len(new)
        repeated += 512 * min(hits, (request.prompt - 1) // 512)
        known.update(request.content.names)
    assert result["prefix_cache_hits"] <= repeated
    assert result["prefix_cache_hits"] / result["prefix_cache_queries"] == pytest.approx(0.373, abs=0.005)


def test_metrics_of_a_run_with_and_without_the_cache() -> None:
    cached = simulate(scenario(100), two_equal_prompts()).result()
    plain = simulate(scenario(100, enable_prefix_caching=False), two_equal_prompts()).result()
    assert (cached["prefix_cache_queries"], cached["prefix_cache_hits"], cached["prefix_hit_rate"]) == (200, 80, 0.4)
    assert cached["prefix_cache_evictions"] == 0
    assert cached["saved_prefill_s"] == pytest.approx(80 * 1e-4)
    assert plain["busy_s"] - cached["busy_s"] == pytest.approx(80 * 1e-4)
    assert not any("prefix" in name for name in plain)
    assert cached["prompt_tokens_computed"] == plain["prompt_tokens_computed"] - 80


def test_requests_csv_has_the_cached_tokens_and_a_search_can_use_the_hit_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"id": id, "arrival_s": 10.0 * id, "prompt_tokens": 100, "output_tokens": 4, "content": [["system", 80]]}
        for id in range(2)
    ]
    Path("trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = {"trace": "trace.jsonl", "policy": "vllm-v1", "profile": COST, "engine": {"num_blocks": 100}}
    Path("scenario.yaml").write_text(json.dumps(base))
    said = run_sim(capsys, "run", "scenario.yaml", "-o", "out")
    assert said.code == 0 and "Prefix cache hits (% of prompt tokens): 40.00" in " ".join(said.out.split())
    header, first, second = Path("out/requests.csv").read_text().splitlines()
    column = header.split(",").index("cached_tokens")
    assert (first.split(",")[column], second.split(",")[column]) == ("0", "80")
    params = {"policy.enable_prefix_caching": [False, True]}
    sweep = servesim.sweep(
        base=base, params=params, objectives=["prefix_hit_rate"], subject_to=["prefix_hit_rate >= 0.3"]
    )
    assert sweep.scenario()["policy"]["enable_prefix_caching"] is True

"""docs/metrics.md and run-files.md: they name every key of result.json, and every column and key of the other files."""

from __future__ import annotations

import csv
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from servesim.cli import main
from servesim.runs.metric_table import LATENCIES, METRICS, STATISTICS

from ..conftest import ROOT

LATENCY = re.compile(rf"(?:{'|'.join(STATISTICS)})_({'|'.join(LATENCIES)})_ms")
WORKLOAD = {
    "requests": 60, "arrivals": {"kind": "poisson", "rate": 20},
    "lengths": {"kind": "uniform", "prompt": [20, 60], "output": [5, 40]},
}  # fmt: skip
PREFIXES = {**WORKLOAD, "prefixes": {"count": 2, "tokens": 32}}
ENGINE = {"num_blocks": 60, "block_size": 16}
CACHING = {"name": "vllm-v1", "enable_prefix_caching": True}
SCENARIOS: dict[str, dict[str, Any]] = {
    "prefix cache": {"policy": CACHING, "workload": PREFIXES, "engine": ENGINE},
    "radix cache": {"policy": {"name": "sglang"}, "workload": PREFIXES, "engine": {"num_blocks": 900, "block_size": 1}},
    "slots": {"policy": {"name": "llm-serving", "decode_batch": 4}, "workload": WORKLOAD},
    "replicas": {"policy": CACHING, "workload": PREFIXES, "engine": ENGINE, "cluster": {"replicas": 2}},
    "several answers": {"policy": {"name": "vllm"}, "trace": "answers.csv", "engine": ENGINE},
    "drafts": {"policy": CACHING, "workload": WORKLOAD, "speculative": {"tokens": 2, "acceptance": 0.5}},
}  # fmt: skip


def names_on_the_pages() -> set[str]:
    text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("metrics.md", "run-files.md"))
    return {name for code in re.findall(r"`([^`\n]+)`", text) for name in re.split(r"[\s,]+", code)}


def missing(names: Any) -> set[str]:
    """Return the names that the pages do not have; a statistic of a latency is described by the latency."""
    plain = {LATENCY.sub(r"\1", re.sub(r"\[.*\]", "", name)) for name in names}
    return plain - names_on_the_pages()


def test_the_page_of_metrics_names_every_metric() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert sorted(missing(METRICS)) == []
    assert sorted(LATENCY.sub(r"\1", name) for name in METRICS if LATENCY.sub(r"\1", name) not in text) == []


def columns_of(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return next(csv.reader(file))


def keys_of_lines(path: Path) -> set[str]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return {key for line in text.splitlines() for key in json.loads(line)}


def keys_of(path: Path) -> list[str]:
    return list(json.loads(path.read_text()))


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_pages_name_every_key_and_column_of_a_run(name: str, tmp_path: Path) -> None:
    scenario, out, log = tmp_path / "scenario.json", tmp_path / "out", tmp_path / "log.jsonl"
    scenario.write_text(json.dumps({**SCENARIOS[name], "profile": "h200-llama2-7b", "slo": {"ttft": 500}}))
    (tmp_path / "answers.csv").write_text("arrival_s,prompt_tokens,output_tokens,n\n0,100,20,2\n0.1,50,10,4\n")
    assert main(["run", str(scenario), "-o", str(out), "--decisions", str(log), "--intervals", "2", "-j", "1"]) == 0
    keys = [*keys_of(out / "result.json"), *keys_of(out / "manifest.json")]
    assert sorted(missing([*keys, *columns_of(out / "requests.csv"), *keys_of_lines(log)])) == []


def test_the_pages_name_every_key_and_column_of_a_replay(tmp_path: Path) -> None:
    scenario, out = tmp_path / "scenario.json", tmp_path / "out"
    few = {**WORKLOAD, "requests": 4, "lengths": {"kind": "fixed", "prompt": 20, "output": 3}}
    scenario.write_text(json.dumps({"policy": {"name": "vllm-v1"}, "workload": few, "profile": "h200-llama2-7b"}))
    assert main(["replay", str(scenario), "--backend", "fake", "-o", str(out)]) == 0
    live = out / "live"
    names = {*keys_of(live / "result.json"), *keys_of(live / "manifest.json"), *columns_of(live / "requests.csv")}
    names |= {*columns_of(live / "steps.csv"), *keys_of_lines(live / "sent.jsonl")}
    assert sorted(missing(names | keys_of_lines(live / "decisions.jsonl.gz"))) == []

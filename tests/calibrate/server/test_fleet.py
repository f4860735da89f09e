"""`sim serve --replicas`: emulated servers on ports of their own, each with its own state."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("aiohttp")

from servesim.calibrate.client.server_counters import CACHED_TOKENS, read_counters
from servesim.cli import main

from ...events import PATIENCE_S, wait_until
from ..device.running_workers import running_workers
from .fleet import FLEET, serving_fleet

SCENARIO = """
policy: {name: vllm-v1, max_num_seqs: 8}
engine: {num_blocks: 200, block_size: 16, max_model_len: 2048}
profile: {base: 0.002, prefill_token: 0.00001, decode_live: 0.0001}
"""


def complete(url: str, prompt: str, tokens: int = 2) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": tokens}).encode()
    with urlopen(Request(f"{url}/v1/completions", body), timeout=PATIENCE_S) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == tokens


def test_replicas_have_ports_metrics_and_prefix_caches_of_their_own(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(SCENARIO)
    with serving_fleet(scenario, 2) as (urls, process):
        prompt = " ".join(["word"] * 100)
        complete(urls[0], prompt)
        complete(urls[1], prompt)
        complete(urls[1], prompt)
        counts = [read_counters(url) for url in urls]
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=PATIENCE_S)
    assert len(set(urls)) == 2
    assert [each["vllm:request_success_total"] for each in counts] == [1, 2]
    assert [each[CACHED_TOKENS] for each in counts] == [0, 96]  # all full blocks, of the same server only
    assert process.returncode == 0
    assert errors == ""
    assert out == "stopped after 6 model calls\n"


def test_the_servers_of_pools_have_the_settings_of_their_pool(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    pools = "[{name: small, engine: {num_blocks: 100}}, {name: large, replicas: 1}]"
    scenario.write_text(f"{SCENARIO}cluster: {{pools: {pools}}}\n")
    blocks = []
    with serving_fleet(scenario, 2) as (urls, _):
        for url in urls:
            with urlopen(f"{url}/serving/state", timeout=PATIENCE_S) as answer:
                blocks.append(json.load(answer)["total_blocks"])
    assert blocks[1] - blocks[0] == 100


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_a_dead_engine_stops_the_fleet_with_one_line(tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(SCENARIO)
    with serving_fleet(scenario, 2) as (_, process):
        workers = running_workers(FLEET, scenario)
        assert len(workers) == 2
        os.kill(workers[1], signal.SIGKILL)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert errors.count("\n") == 1
    assert "died in serve, killed by SIGKILL" in errors
    wait_until(lambda: not running_workers(FLEET, scenario), "the end of the workers")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--replicas", "2", "--set", "cluster.pools=[{name: a, replicas: 3}]"),
            "--replicas: expected 3, the replicas of cluster.pools, got 2",
        ),
        (("--replicas", "0"), "--replicas: expected 1 to 1024, got 0"),
        (("--replicas", "2", "--backend", "torch"), "--replicas 2: expected --backend fake; a device runs one server"),
        (("--replicas", "8", "--port", "65530"), "--port: expected 0 to 65528, got 65530"),
    ],
)
def test_wrong_options_are_one_line(options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--policy", "vllm", "--backend", "fake", *options]) == 2
    assert capsys.readouterr().err == f"sim: {message}\n"


def test_a_port_of_another_replica_in_use_is_known_before_a_server_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        assert main(["serve", "--policy", "vllm", "--backend", "fake", "--replicas", "2", "--port", str(port - 1)]) == 2
    assert f"--port {port}: cannot listen on 127.0.0.1" in capsys.readouterr().err

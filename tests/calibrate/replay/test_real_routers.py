"""Real routers in front of emulated servers, against the simulation: the servers of requests, prefix hits and TTFT.

It needs an interpreter with the packages of tools/routers.txt in SERVESIM_ROUTERS_PYTHON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

pytest.importorskip("aiohttp")

from ...commands.running import run_sim
from ..server.fleet import serving_fleet

PYTHON = os.environ.get("SERVESIM_ROUTERS_PYTHON", "")
pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(
        not PYTHON, reason="needs SERVESIM_ROUTERS_PYTHON, an interpreter with the packages of tools/routers.txt"
    ),
]
PREFIX = 1600  # tokens
SCENARIO = f"""
workload:
  requests: 64
  arrivals: {{kind: poisson, rate: 5}}
  lengths: {{prompt: [300, 500], output: [10, 30]}}
  prefixes: {{count: 8, tokens: {PREFIX}, zipf: 0.5, share: 1.0}}
policy: {{name: vllm-v1, max_num_seqs: 32}}
engine: {{num_blocks: 12000, block_size: 16, max_model_len: 8192}}
profile: {{base: 0.02, prefill_token: 0.0004, decode_live: 0.0006}}
seed: 6
"""
ROUTERS = [  # module, policy, our name
    ("sglang_router", "cache_aware", "sglang-cache-aware"),
    ("sglang_router", "round_robin", "sglang-round-robin"),
    ("vllm_router", "cache_aware", "sglang-cache-aware"),
]


@contextmanager
def real_router(module: str, policy: str, servers: list[str], log: Path) -> Iterator[str]:
    """Run a router in front of servers; yield its address when it knows all of them."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [str(each.getsockname()[1]) for each in (one, other)]
    command = [PYTHON, "-m", f"{module}.launch_router", "--host", "127.0.0.1", "--port", ports[0]]
    command += ["--prometheus-port", ports[1], "--policy", policy, "--worker-urls", *servers]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    url, until = f"http://127.0.0.1:{ports[0]}", time.monotonic() + 60
    try:
        while not has_servers(url, len(servers)):
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-2000:]
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def has_servers(url: str, count: int) -> bool:
    try:
        with urlopen(f"{url}/readiness", timeout=5) as answer:
            return bool(json.load(answer)["healthy_workers"] == count)
    except (OSError, ValueError, KeyError):
        return False


def test_real_routers_send_as_the_simulated_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(SCENARIO)
    results: dict[tuple[str, str], Any] = {}
    with serving_fleet(scenario, 4) as (servers, _):
        for module, policy, ours in ROUTERS:
            out = tmp_path / f"{module}-{policy}"
            command = ["replay", str(scenario), "--set", "cluster.replicas=4", "--set", f"cluster.router={ours}"]
            for server in servers:
                command += ["--server", server]
            with real_router(module, policy, servers, tmp_path / "router.log") as url:
                said = run_sim(capsys, *command, "--url", url, "--api", "openai-text", "--quiet", "-o", str(out))
            assert said.code == 0, said.error
            results[module, policy] = json.loads((out / "live" / "result.json").read_text())
            simulated = json.loads((out / "sim" / "result.json").read_text())
            # On a busy machine, a request waits for every process on its way as the client waits to send it.
            allowed = 0.05 * simulated["mean_ttft_ms"] + 10 * results[module, policy]["lateness_ms"]["mean"]
            assert abs(results[module, policy]["mean_ttft_ms"] - simulated["mean_ttft_ms"]) < allowed
    for (_, policy), result in results.items():
        for server in result["servers"]:
            simulated = server["simulated"]
            assert server["requests"] == simulated["requests"]
            # In turn, two requests with a new prefix can meet on a server: the second finds the first's blocks or not.
            assert abs(server["cached_tokens"] - simulated["cached_tokens"]) <= PREFIX * (policy == "round_robin")
    in_turn = results["sglang_router", "round_robin"]["mean_ttft_ms"]
    assert all(result["mean_ttft_ms"] < in_turn for (_, policy), result in results.items() if policy == "cache_aware")

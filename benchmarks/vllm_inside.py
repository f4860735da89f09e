"""A servesim policy inside a real vLLM server: decisions against stock vLLM, and latencies against the simulation.

    python benchmarks/vllm_inside.py --vllm-python .venv-vllm/bin/python --model TINY_LLAMA -o out

It starts one server after the other: stock vLLM, and three policies inside it. Each serves a burst, which is queued
while vLLM is paused so that no decision depends on the time of an arrival, and then a Poisson load, several times.
Printed are the equal steps of the bursts and the mean latencies of the loads, measured and simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import servesim

PORT = 18_931
URL = f"http://127.0.0.1:{PORT}"
ADAPTER = "servesim.calibrate.adapter.vllm_scheduler"
FLAGS = {
    "load-format": "dummy", "dtype": "float32", "block-size": 32, "max-model-len": 1024, "max-num-seqs": 8,
    "max-num-batched-tokens": 1024, "num-gpu-blocks-override": 65,
}  # fmt: skip
ENGINE = {"num_blocks": 64, "block_size": 32, "max_model_len": 1024}
V1 = {"name": "vllm-v1", "max_num_seqs": 8, "max_num_batched_tokens": 1024, "async_scheduling": False}
# Scheduler class, policy, and whether vLLM's prefix cache is on.
SERVERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "stock vLLM": (f"{ADAPTER}.LoggedScheduler", V1, True),
    "vllm-v1": (f"{ADAPTER}.PolicyScheduler", V1, True),
    "shortest output first": (f"{ADAPTER}.PolicyScheduler", {**V1, "order": "shortest-output"}, True),
    "delay factor 2": (
        f"{ADAPTER}.PolicyScheduler",
        {"name": "vllm", "delay_factor": 2.0, "max_num_seqs": 8, "max_num_batched_tokens": 1024},
        False,
    ),
}


@contextmanager
def server(args: argparse.Namespace, name: str, folder: Path) -> Iterator[None]:
    """A vLLM server on a port of 127.0.0.1, stopped at the end."""
    scheduler, policy, caching = SERVERS[name]
    flags = [word for key, value in FLAGS.items() for word in (f"--{key}", str(value))]
    flags += ["--enforce-eager", "--enable-prefix-caching" if caching else "--no-enable-prefix-caching"]
    command = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(PORT)]
    command += ["--model", args.model, "--scheduler-cls", scheduler, *flags]
    package = str(Path(servesim.__file__).parent.parent)
    environment = {
        **os.environ, "PYTHONPATH": package, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1",
        "SERVESIM_POLICY": json.dumps(policy), "SERVESIM_DECISIONS": str(folder / "decisions.jsonl"),
    }  # fmt: skip
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            wait_until_ready(process, folder / "server.log")
            yield
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        try:
            urlopen(f"{URL}/health", timeout=5).close()
            return
        except (URLError, OSError):
            time.sleep(0.5)
        if process.poll() is not None:
            sys.exit(f"vLLM ended: {log.read_text()[-2000:]}")
    sys.exit(f"vLLM is not ready after 300 s: {log}")


def post(path: str) -> None:
    urlopen(Request(f"{URL}{path}", method="POST"), timeout=30).close()


def sim(*words: Any) -> str:
    """Run a command of servesim and return its output."""
    result = subprocess.run([sys.executable, "-m", "servesim", *map(str, words)], capture_output=True, text=True)
    assert result.returncode == 0, f"sim {words}: {result.stdout[-1500:]} {result.stderr[-1500:]}"
    return result.stdout


def write_trace(path: Path, requests: int, rate: float) -> None:
    """Write a trace: many short answers and some long ones."""
    rng, now = random.Random(7), 0.0
    with path.open("w") as file:
        file.write("arrival,prompt,output\n")
        for _ in range(requests):
            output = rng.randint(100, 240) if rng.random() < 0.3 else rng.randint(4, 40)
            file.write(f"{now:.4f},{rng.randint(20, 300)},{output}\n")
            now += rng.expovariate(rate)


def send(folder: Path, name: str, trace: Path, paused: bool) -> list[dict[str, Any]]:
    """Replay a trace against the server; return the lines of the server's decision log."""
    log = folder / "decisions.jsonl"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    scenario = folder / "scenario.yaml"
    words = [
        "replay",
        scenario,
        "--trace",
        trace,
        "--url",
        URL,
        "--api",
        "openai",
        "--live-only",
        "-q",
        "-o",
        folder / name,
    ]
    if paused:
        post("/pause?mode=keep")
    with subprocess.Popen([sys.executable, "-m", "servesim", *map(str, words)], stdout=subprocess.DEVNULL) as client:
        if paused:
            time.sleep(15)  # all requests are in the queue
            post("/resume")
        assert client.wait() == 0, words
    lines = [json.loads(line) for line in log.read_text().splitlines()[before:]]
    (live,) = [path.parent for path in (folder / name).rglob("requests.csv")]
    (live / "decisions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def write_steps(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a decision log as the step log that `sim calibrate import steps` reads."""
    computed: dict[Any, int] = {}
    with path.open("w") as file:
        for line in lines:
            computed.update(dict(line.get("cached", [])) or dict.fromkeys(line["admitted"], 0))
            prompts = set(line["prompts"])
            batch = [[str(id), tokens, computed[id], id not in prompts] for id, tokens in line["chunks"]]
            for id, tokens in line["chunks"]:
                computed[id] += tokens
            row = {"step": line["step"], "start": line["t"], "end": line["t_end"], "batch": batch}
            file.write(json.dumps(row) + "\n")


def latencies(folder: Path) -> tuple[float, float]:
    """Return mean TTFT and mean E2E latency of a run folder, in milliseconds."""
    (path,) = folder.rglob("result.json")
    result = json.loads(path.read_text())
    return result["mean_ttft_ms"], result["mean_e2el_ms"]


def equal_steps(one: Sequence[Mapping[str, Any]], two: Sequence[Mapping[str, Any]]) -> str:
    keys = ("kind", "chunks", "preempted", "free", "cached")
    same = sum(all(a.get(key) == b.get(key) for key in keys) for a, b in zip(one, two))
    return f"{same} of {max(len(one), len(two))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rate", type=float, default=12.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(SERVERS), help="the report needs all of them")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    args.output = args.output.absolute()
    args.output.mkdir(parents=True, exist_ok=True)
    burst, load = args.output / "burst.csv", args.output / "load.csv"
    write_trace(burst, args.requests, 25.0)
    write_trace(load, args.requests, args.rate)
    for name in args.only:
        folder, (_, policy, caching) = folder_of(args.output, name), SERVERS[name]
        folder.mkdir()
        prefix_cache = {"enable_prefix_caching": caching} if policy["name"] == "vllm-v1" else {}
        scenario = {"policy": {**policy, **prefix_cache}, "engine": ENGINE}
        (folder / "scenario.yaml").write_text(json.dumps(scenario))
        print(f"{time.strftime('%X')} {name}", flush=True)
        with server(args, name, folder):
            send(folder, "burst", burst, paused=True)
            for number in range(args.repeats):
                send(folder, f"load-{number}", load, paused=False)
    if all(folder_of(args.output, name).exists() for name in SERVERS):
        report(args.output, args.repeats)


def folder_of(output: Path, name: str) -> Path:
    return output / name.replace(" ", "-").replace(",", "")


def report(output: Path, repeats: int) -> None:
    """Print the equal steps of the bursts, and the latencies of the loads, measured and simulated."""
    folders = {name: folder_of(output, name) for name in SERVERS}
    logs = {name: read_log(folder / "burst") for name, folder in folders.items()}
    stock = folders["stock vLLM"]
    steps = [line for number in range(repeats) for line in read_log(stock / f"load-{number}")]
    write_steps(steps, output / "steps.jsonl")
    if not (output / "profile").exists():
        # --enforce-eager: vLLM prepares no shapes
        words = ["--first-use", 0, "-o", output / "profile", "-q"]
        sim("calibrate", "import", "steps", output / "steps.jsonl", *words)
    (output / "burst0.csv").write_text(zero_arrivals(output / "burst.csv"))
    print(f"{'':24}{'steps of the burst equal to':^30}{'mean TTFT, ms':^33}{'mean E2E latency, ms':^33}")
    print(f"{'':24}{'stock':>15}{'simulation':>15}" + f"{'measured (spread)':>22}{'simulated':>11}" * 2)
    for name, folder in folders.items():
        for trace, target in (("burst0", "sim-burst"), ("load", "sim-load")):
            if not (folder / target).exists():
                words = ["--profile", output / "profile", "-q", "-o", folder / target]
                words += ["--trace", output / f"{trace}.csv", "--decisions", folder / target / "decisions.jsonl"]
                sim("run", folder / "scenario.yaml", *words)
        simulated = read_log(folder / "sim-burst")
        runs = [latencies(folder / f"load-{number}") for number in range(repeats)]
        ours = latencies(folder / "sim-load")
        cells = []
        for index in (0, 1):
            values = [run[index] for run in runs]
            spread = f"{min(values):.0f}-{max(values):.0f}"
            cells.append(f"{statistics.mean(values):.0f} ({spread})".rjust(22) + f"{ours[index]:.0f}".rjust(11))
        equal = equal_steps(logs["stock vLLM"], logs[name]), equal_steps(simulated, logs[name])
        print(f"{name:24}{equal[0]:>15}{equal[1]:>15}{''.join(cells)}")


def read_log(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.rglob("decisions.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def zero_arrivals(path: Path) -> str:
    header, *rows = path.read_text().splitlines()
    return "\n".join([header, *("0," + row.partition(",")[2] for row in rows)]) + "\n"


if __name__ == "__main__":
    main()

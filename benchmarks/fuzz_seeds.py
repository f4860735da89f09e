"""Small valid content of the files that fuzz.py mutates: scenarios, sweeps, profiles, samples, tables."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

Files = dict[str, bytes]
Command = tuple[str, ...]

SWEEP_OPTIONS = ("-j", "1", "-q", "--no-report")
WORKLOAD = {
    "requests": 5,
    "arrivals": {"kind": "poisson", "rate": 10},
    "lengths": {
        "kind": "lognormal", "prompt": {"mean": 20, "sd": 10, "max": 60}, "output": {"mean": 6, "sd": 2, "max": 10},
    },
}  # fmt: skip
ENGINE = {
    "num_blocks": 64, "block_size": 16, "host_blocks": 8, "max_model_len": 128, "prefill_buckets": [32, 64],
    "decode_buckets": [2, 4], "front_end": {"lag": 2, "end_lag": True, "seconds": 0.01}, "client_timeout": 60,
    "cold_start": {"prefill": 0.1, "decode": 0.1}, "reject_oversized": "auto",
}  # fmt: skip
POLICY = {"name": "llm-serving", "decode_batch": 4, "prefill_batch": 2}
SCENARIO = {
    "name": "s", "workload": WORKLOAD, "policy": POLICY, "engine": ENGINE, "profile": "p", "seed": 3,
    "slo": {"ttft": 500, "tpot": 50, "e2el": 5000},
}  # fmt: skip
TRACE_SCENARIO = {"trace": {"path": "t.csv", "limit": 3, "sort": True}, "policy": {"name": "vllm"}, "profile": "p"}
WORKLOADS: tuple[dict[str, Any], ...] = (
    {"contest": {"X": 2, "T": 3, "send_overhead": 0.01}},
    {"mix": [WORKLOAD, {"contest": {"X": 1, "T": 3}}]},
    {**WORKLOAD, "arrivals": {"kind": "gamma", "rate": 4, "cv": 2}, "limit": 8, "priorities": {0: 0.9, 1: 0.1}},
    {**WORKLOAD, "arrivals": {"kind": "closed", "users": 2, "think_time": 0.5}},
    {**WORKLOAD, "arrivals": {"kind": "burst"}, "lengths": {"kind": "fixed", "prompt": 9, "output": 3}},
)
COSTS: tuple[dict[str, Any], ...] = (
    {"kind": "linear", "base": 0.01, "prefill_token": 0.001, "decode_row": 0.001, "context": 1e-6},
    {"kind": "parts", "prefill": {"tokens": [[1, 0.01], [64, 0.02], [128, 0.03]]},
     "decode": {"rows": [[1, 0.01, 1e-6], [8, 0.02, 1e-6]]}, "mixed": {"one_pass": False, "overlap": 0.2}},
)  # fmt: skip
PROFILE = {
    "name": "p", "device": "d", "model": "tiny", "how": "by hand", "error": {"prefill": {"mean": 0.02, "median": 0.01}},
    "grid": {"prefill_tokens": [1, 64], "decode_rows": [1, 8], "context": [0, 512]},
    "noise": {"prefill": [0.9, 1.0, 1.1], "decode": [0.9, 1.0, 1.1]}, "cold_start": {"prefill": 0.1, "decode": 0.2},
    "busy": 1.5, "cost": COSTS[0],
}  # fmt: skip
LLM_SERVING = {
    "model_config": {
        "model_name": "llama_7b", "max_generate_length": 64, "seq_length": [64], "seq_type": "static",
        "prefill_batch_size": [1], "decode_batch_size": [4], "batching_strategy": "continuous", "page_attention": True,
    },
    "serving_config": {"server_port": 8835},
    "pa_config": {"num_blocks": 64, "block_size": 16, "decode_seq_length": 128},
}  # fmt: skip
SWEEP: dict[str, Any] = {
    "name": "w", "base": SCENARIO, "params": {"policy.decode_batch": [2, 4], "policy.prefill_batch": [1]},
    "replications": 2, "objectives": ["makespan", "mean_ttft_ms"], "baseline": {"policy.decode_batch": 1},
    "confidence": 0.9, "confirm": 1,
}  # fmt: skip
SEARCH: dict[str, Any] = {
    "base": SCENARIO, "params": {"policy.decode_batch": {"integers": [1, 4]}, "policy.prefill_batch": [1, 2]},
    "trials": 2, "batch": 2, "objectives": ["makespan"], "seed": 1, "sampler": "random",
}  # fmt: skip


def text(tree: Any) -> bytes:
    """Return a tree as YAML."""
    return yaml.safe_dump(tree, sort_keys=False).encode()


@cache
def samples_csv() -> bytes:
    """Return samples of steps that a linear cost model predicts."""
    from servesim.core import Shape

    names = ("kind", "point", "round", "seconds", "host_seconds", "flagged", *Shape._fields, "failed")
    rows = [",".join(names)]
    shapes = [("prefill", Shape(1, n, n, n * n, 0)) for n in (8, 16, 32, 64)]
    shapes += [("decode", Shape(0, 0, 0, 0, 0, n, n, n * c, 0)) for n in (1, 2, 4) for c in (16, 64)]
    for point, (kind, shape) in enumerate(shapes):
        for repeat in range(2):
            seconds = 0.01 + 0.001 * shape.prefill_tokens + 0.002 * shape.decode_rows + 1e-5 * shape.context
            cells = (kind, point, repeat, seconds, 0.0001, "", *shape, "")
            rows.append(",".join(map(str, cells)))
    return ("\n".join(rows) + "\n").encode()


@cache
def npz() -> bytes:
    """Return Vidur's tables for a small model."""
    import numpy as np

    tables: dict[str, Any] = {
        "comp_ms_per_layer": np.linspace(0.1, 1, 129), "kvsave_ms_per_layer": np.linspace(0, 0.1, 129),
        "attn_decode_ms_per_layer": np.ones((9, 5)), "attn_prefill_ms_per_layer": np.ones((3, 129)),
        "layers": np.array(4),
    }  # fmt: skip
    out = io.BytesIO()
    np.savez(out, **tables)
    return out.getvalue()


PROFILE_FILES: Files = {"p/profile.yaml": text(PROFILE)}


@cache
def folder_of(kind: str) -> Files:
    """Return the files that a command writes to its output folder."""
    from servesim.cli import main

    inputs = {"f.yaml": text({**SWEEP, "confirm": 0}), "se.yaml": text(SEARCH), "s.yaml": text(SCENARIO)}
    commands: dict[str, list[Command]] = {
        "sweep": [("sweep", "f.yaml", "-o", "out", *SWEEP_OPTIONS)],
        "search": [("search", "se.yaml", "-o", "out", *SWEEP_OPTIONS)],
        "run": [("run", "s.yaml", "-o", "out")],
        "replay": [("replay", "s.yaml", "--backend", "fake", "--warm-up", "0", "--quiet", "-o", "out")],
    }
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder, {**inputs, **PROFILE_FILES})
        with quiet(folder):
            for command in commands[kind]:
                if main(command) != 0:
                    raise SystemExit(f"fuzz: the valid command `sim {' '.join(command)}` failed")
        out = folder / "out"
        files = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    return {name: data for name, data in sorted(files.items()) if data and not name.endswith((".png", ".lock"))}


def write_files(folder: Path, files: Files) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@contextmanager
def quiet(folder: Path) -> Iterator[None]:
    """Run a block in a folder, without output."""
    start = os.getcwd()
    os.chdir(folder)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        os.chdir(start)


LAYER_TABLES: Files = {
    "l/attention.csv": b"prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n0,0,1,16,8\n0,0,4,64,9\n16,0,0,0,9\n"
    b"16,0,1,16,12\n16,32,4,64,20\n",
    "l/dense.csv": b"layer,tokens,time_us\nembedding,1,3\nembedding,64,4\nlayernorm,1,2\nlayernorm,64,3\n",
    "l/per_sequence.csv": b"layer,sequences,time_us\nlm_head,1,700\nlm_head,8,800\n",
}
STEP_LOG = b"".join(
    b'{"step": %d, "start": %.3f, "end": %.3f, "waiting": 0, "batch": [["a", 1, %d, true], ["b", %d, 0, false]]}\n'
    % (k, 0.031 * k, 0.031 * k + 0.03, 30 + k, 10 + 20 * (k % 3))
    if k % 2
    else b'{"step": %d, "start": %.3f, "end": %.3f, "batch": [["a", 1, %d, true]]}\n'
    % (k, 0.031 * k, 0.031 * k + 0.02, 30 + k)
    for k in range(12)
)

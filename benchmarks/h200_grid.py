"""Measure step times of several models on a GPU, over a wider grid than a probe: many rows, long and unequal contexts.

python benchmarks/h200_grid.py main8|main7|law OUT
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any, Optional

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE / "calibrate" / "device"))
importlib.import_module("worker").find_packages()

from servesim.calibrate.device import worker  # noqa: E402
from servesim.calibrate.probe import grid, measure  # noqa: E402
from servesim.calibrate.probe.grid import Point  # noqa: E402
from servesim.costs.model_arithmetic import Model  # noqa: E402
from servesim.costs.public_models import PUBLIC_MODELS as PUBLIC  # noqa: E402
from servesim.files.step_table import write_steps  # noqa: E402

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
BUCKETS = [r for r in ROWS if r <= 512]
CONTEXTS = (16, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131000)
PROMPTS = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288,
           16384)  # fmt: skip


def log_uniform(rng: random.Random, low: float, high: float) -> int:
    return int(max(low, min(high, round(low * (high / low) ** rng.random()))))


def main_grid(length: int, tokens: int, seed: int = 0) -> list[Point]:
    """`length`: longest sequence; `tokens`: most cached tokens of a step."""
    rng = random.Random(f"grid {seed}")
    points = decodes(length, tokens, rng) + prefills(length, rng) + mixed_steps(length, tokens, rng)
    points += [Point("swap", blocks=n) for n in (1, 4, 16, 64, 256)]
    points += [Point("busy", decoding=rows, context=128) for rows in (1, 8, 32)]
    return list(dict.fromkeys(points))


def decodes(length: int, tokens: int, rng: random.Random) -> list[Point]:
    """Equal contexts, one long context among short ones, and random ones."""
    points = []
    for rows in ROWS:
        points += [Point("decode", decoding=rows, context=c) for c in CONTEXTS if c < length and rows * c <= tokens]
        if rows > 4:
            points += [Point("decode", decoding=rows - rows // 6, context=c) for c in (128, 512) if rows * c <= tokens]
    for rows in (8, 32, 128, 512):
        for short in (128, 1024):
            for long in (4096, 16384, 65536, 131000):
                if long < length and rows * short + long <= tokens:
                    point = Point("decode", decoding=rows, context=short, cached=long)
                    points.append(point)
    for _ in range(220):
        rows = log_uniform(rng, 1, 1024)
        context = log_uniform(rng, 16, max(17, min(length - 1, tokens // rows)))
        points.append(Point("decode", decoding=rows, context=context, spread=rng.choice((0.0, 0.7, 1.2))))
    return points


def prefills(length: int, rng: random.Random) -> list[Point]:
    """Whole prompts, chunks after cached tokens, and random ones."""
    points = []
    for rows in (1, 2, 4, 8, 16):
        points += [
            Point("prefill", rows, n // rows)
            for n in PROMPTS
            if n // rows <= length - 1 and (rows == 1 or n >= 8 * rows)
        ]
    points += [
        Point("prefill", 1, t, c)
        for t in (64, 256, 512, 2048, 8192)
        for c in (128, 512, 1536, 4096, 16384, 65536, 120000)
        if t + c < length and t * c <= 1.2e8
    ]
    for _ in range(90):
        rows = log_uniform(rng, 1, 16)
        t = log_uniform(rng, 2, max(2, min(length - 1, 8192 // rows)))
        points.append(Point("prefill", rows, t, spread=0.7 if rows > 1 and rng.random() < 0.7 else 0.0))
    return points


def mixed_steps(length: int, tokens: int, rng: random.Random) -> list[Point]:
    """Prompt chunks and decodes."""
    points = []
    chunks = [(1, t, c) for t in (32, 128, 192, 256, 400, 512, 1024, 2048, 4096, 7168) for c in (0, 512, 4096)]
    chunks += [(4, 32, 0), (3, 64, 0), (2, 128, 256), (2, 448, 0), (4, 512, 0), (8, 256, 0)]
    others = ((4, 128), (32, 128), (48, 600), (96, 512), (248, 512), (504, 128), (504, 1024), (1016, 128), (1016, 512))
    for rows, t, c in chunks:
        picked = others if t in (32, 256, 512, 2048) and c in (0, 512) else rng.sample(others, 3)
        points += [Point("mixed", rows, t, c, d, x) for d, x in picked if d * x <= tokens and t + c < length]
    for _ in range(160):
        rows = log_uniform(rng, 1, 8)
        t = log_uniform(rng, 2, max(2, min(length - 1, 8192 // rows)))
        d = log_uniform(rng, 1, 1016)
        x = log_uniform(rng, 16, max(17, min(length - 1, 8192, tokens // d)))
        cached = rng.choice((0, 0, 0, 1024)) if t + 1024 < length else 0
        points.append(Point("mixed", rows, t, cached, d, x, 0, rng.choice((0.0, 0.7))))
    return points


def law_grid(tokens: int) -> list[Point]:
    """Fewer points, for many models."""
    points = [
        Point("decode", decoding=r, context=c)
        for r in (1, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
        for c in (16, 512, 2048)
        if r * c <= tokens
    ]
    points += [Point("decode", decoding=r, context=c) for r, c in ((1, 16384), (8, 16384), (32, 8192))]
    points += [Point("prefill", 1, n) for n in (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)]
    points += [Point("prefill", 4, n) for n in (32, 128, 512, 1024)]
    points += [Point("prefill", 1, t, c) for t, c in ((512, 4096), (2048, 4096), (512, 16384))]
    points += [
        Point("mixed", 1, t, 0, d, x) for t in (32, 128, 448, 1024, 2048) for d, x in ((8, 512), (64, 512), (248, 512))
    ]
    return points


def lengths(point: Point, max_seq_len: int, rng: random.Random) -> list[tuple[int, int]]:
    """As the grid's, but a decode point with `cached` has one long row."""
    if point.kind == "decode" and point.cached:
        return [(1, point.cached)] + [(1, point.context)] * (point.decoding - 1)
    return original(point, max_seq_len, rng)


original = grid.lengths
measure.lengths = lengths
measure.MIN_SAMPLES = 6
STARTED = time.monotonic()


def shard(name: str, degree: int) -> Model:
    """One of the tensor-parallel parts of a model, without its all-reduces."""
    m = PUBLIC[name]
    return dataclasses.replace(
        m,
        name=f"{name}-tp{degree}",
        heads=m.heads // degree,
        kv_heads=max(1, m.kv_heads // degree),
        intermediate=m.intermediate // degree,
        vocab=m.vocab // degree,
        head=m.head_size,
    )


def session(
    model: Model,
    blocks: int,
    budget: float,
    points: list[Point],
    out: str,
    options: Optional[dict[str, Any]] = None,
    extras: bool = True,
) -> None:
    """Measure the points of a model within `budget` seconds. `extras`: also sampling, power and copies to the host."""
    label = model.name + ("-eager" if options and options.get("graphs") is False else "")
    start = time.monotonic()
    backend = worker.open_backend({"backend": "torch", "options": {"row_buckets": BUCKETS, **(options or {})}})
    backend.load(model, blocks=blocks, block_size=16, host_blocks=256 if extras else 0)
    print(label, "loaded", round(time.monotonic() - start, 1), flush=True)
    measure.grid = lambda *args: points
    if not extras:
        measure.measure_sampling = lambda *args: measure.Medians()
        measure.measure_power = lambda *args: None

    def report(r: dict[str, Any]) -> None:
        if r["round"] % 3 == 0 and r["left"] % 20 < 1.5:
            counts = f"{r['known']}/{r['points']} {r['samples']} samples {r['failed']} failed"
            print(label, counts, f"{r['left']:.0f} s left", flush=True)

    result = measure.run(backend, {"budget": budget, "precision": 0.004, "max_rows": 512, "max_tokens": 8192}, report)
    write_steps(Path(out, f"{label}.csv"), measure.COLUMNS, result["rows"])
    about = {
        **result["about"],
        "power": result["power"],
        "sampling_medians": result["sampling"],
        "failed": len(result["failed"]),
    }
    Path(out, f"{label}.json").write_text(json.dumps(about, default=str))
    print(
        label,
        "known",
        result["known"],
        "of",
        result["points"],
        "failed",
        len(result["failed"]),
        "seconds",
        round(time.monotonic() - start, 1),
        flush=True,
    )
    close(backend)


def close(backend: Any) -> None:
    """Free the memory of the device."""
    backend.loaded = None
    backend.graphs, backend.host = {}, []
    gc.collect()
    import torch

    torch.cuda.empty_cache()


def pack(out: str) -> None:
    """Replace the results by one archive."""
    import tarfile

    with tarfile.open(Path(out, f"grid-{sys.argv[1]}.tar.gz"), "w:gz") as tar:
        for path in sorted([*Path(out).glob("*.csv"), *Path(out).glob("*.json")]):
            tar.add(path, path.name)
    for path in [*Path(out).glob("*.csv"), *Path(out).glob("*.json")]:
        path.unlink()


def main() -> None:
    """Measure, and pack what there is."""
    what, out = sys.argv[1], sys.argv[2]
    os.makedirs(out, exist_ok=True)
    try:
        if what == "main8":
            m = dataclasses.replace(PUBLIC["llama-3.1-8b"], context=131072)
            session(m, 38000, 240, main_grid(131072, 1_000_000), out)
        elif what == "main7":
            m = dataclasses.replace(PUBLIC["llama2-7b"], context=32768)
            session(m, 9000, 240, main_grid(32768, 300_000), out)
        elif what == "law":
            jobs: list[Any] = [(shard("llama-3.1-8b", d), 4000, None) for d in (1, 2, 4, 8)]
            jobs += [(shard("llama-3.3-70b", d), 4000, None) for d in (4, 8)]
            jobs += [(PUBLIC[n], 4000, None) for n in ("qwen2.5-3b", "qwen2.5-14b", "llama-2-13b")]
            jobs += [(PUBLIC["llama-3.1-8b"], 4000, {"graphs": False}), (PUBLIC["qwen2.5-3b"], 4000, {"graphs": False})]
            for model, blocks, options in jobs:
                model = dataclasses.replace(model, context=32768)
                session(model, blocks, 16, law_grid(1_000_000), out, options, extras=False)
        else:  # a check on the CPU
            m = PUBLIC["micro"]
            m = dataclasses.replace(m, heads=2, kv_heads=1, head=32)
            session(
                m,
                40,
                3,
                [p for p in law_grid(600) if p.context < 400 and p.tokens + p.cached < 400 and p.decoding < 20],
                out,
                extras=False,
            )
    finally:
        pack(out)
        print("seconds", round(time.monotonic() - STARTED, 1))


if __name__ == "__main__":
    main()

"""Measure by how much steps in flight are shorter than the same steps alone.

python benchmarks/h200_in_flight.py OUT [llama-3.1-8b llama2-7b ...]

A step is measured in two sequences: between small decodes, as on a server that is not full, and repeated, where the GPU
reaches its power limit. Each sequence runs step by step, and with the next step launched before the last one is
collected. OUT/in_flight.csv has one row per step that ran.
"""

from __future__ import annotations

import csv
import dataclasses
import gc
import random
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from h200_grid import PUBLIC, close, grid, worker
from servesim.calibrate.device.backend import Row, Shape, shape_of_rows
from servesim.calibrate.probe.grid import Point

BUCKETS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512]
SMALL = Point("decode", decoding=32, context=450)
STEPS = 4  # repeats of a step in one sequence
COLUMNS = ("model", "pattern", "mode", "round", "step", "small", *Shape._fields, "seconds")


def points() -> list[Point]:
    """Return decodes, prompts and mixed steps, below and above the largest recorded graph."""
    found = [Point("decode", decoding=r, context=c) for r in (1, 16, 64, 128, 256, 512) for c in (128, 512)]
    found += [Point("decode", decoding=r, context=c) for r, c in ((4, 16384), (64, 4096), (640, 128), (1024, 256))]
    found += [Point("prefill", 1, t) for t in (64, 256, 500, 528, 768, 1024, 2048, 4096, 8192)]
    found += [Point("prefill", 8, t) for t in (16, 62, 128, 256)]
    found += [Point("prefill", 1, t, 4096) for t in (256, 1024)]
    sizes = (32, 128, 256, 400, 528, 640, 768, 1024, 1536, 2016, 4096)
    found += [Point("mixed", 1, t, 0, d, 450) for t in sizes for d in (8, 48)]
    return found + [Point("mixed", 4, t, 0, 200, 450) for t in (16, 64, 128, 256, 450)]


def make_rows(point: Point, blocks: int, vocab: int, start: int) -> list[Row]:
    """Return rows of random tokens, each with blocks of its own."""
    rng, rows, block = random.Random(f"in flight {point} {start}"), [], start
    for tokens, cached in grid.lengths(point, 1 << 20, rng):
        count = -(-(tokens + cached) // 16)
        table = array("i", [1 + (block + index) % (blocks - 1) for index in range(count)])
        block += count
        rows.append(Row(array("i", rng.choices(range(1, vocab), k=tokens)), cached, table))
    return rows


def alone(backend: Any, sequence: Sequence[tuple[Point, list[Row]]]) -> list[float]:
    """Return the seconds of every step; each ends before the next one starts."""
    seconds = []
    for _, rows in sequence:
        start = time.perf_counter()
        backend.step(rows)
        seconds.append(time.perf_counter() - start)
    return seconds


def in_flight(backend: Any, sequence: Sequence[tuple[Point, list[Row]]]) -> list[float]:
    """Return the seconds between the ends of the steps; each is launched before the one before it ends.

    The tokens of decodes are unknown then, as on a server, if the step before has as many rows.
    """
    ends, before = [time.perf_counter()], 0
    for index, (_, rows) in enumerate(sequence):
        sent = [r if len(r.tokens) > 1 or j >= before else Row([-1 - j], *r[1:]) for j, r in enumerate(rows)]
        backend.launch(sent)
        before = len(rows)
        if index:
            backend.collect()
            ends.append(time.perf_counter())
    backend.collect()
    ends.append(time.perf_counter())
    return [after - end for end, after in zip(ends, ends[1:])]


def session(name: str, blocks: int, rounds: int, write: Callable[[Sequence[Any]], Any], todo: list[Point]) -> None:
    """Measure all points of a model."""
    backend = worker.open_backend({"backend": "torch", "options": {"row_buckets": BUCKETS}})
    model = dataclasses.replace(PUBLIC[name], context=32768)
    backend.load(model, blocks=blocks, block_size=16, host_blocks=0)
    todo = [p for p in todo if p.decoding * p.context + p.rows * (p.tokens + p.cached) <= 16 * blocks]
    small = [make_rows(SMALL, blocks, model.vocab, start) for start in (0, 5000)]
    rows = {p: [make_rows(p, blocks, model.vocab, start) for start in (1000, 6000)] for p in todo}
    print(name, "loaded,", len(todo), "points", flush=True)
    for number in range(rounds + 1):  # the first round warms up
        for point in todo:
            for pattern in ("between decodes", "repeated"):
                others = 3 if pattern == "between decodes" else 0
                sequence = []
                for k in range(STEPS):
                    sequence += [(SMALL, small[j % 2]) for j in range(others)] + [(point, rows[point][k % 2])]
                for mode, run in (("alone", alone), ("in flight", in_flight)):
                    backend.synchronize()
                    for k, seconds in enumerate(run(backend, sequence)):
                        own, its_rows = sequence[k]
                        shape = shape_of_rows(its_rows[: own.rows], its_rows[own.rows :])
                        if number:
                            write((name, pattern, mode, number, k, int(own is SMALL), *shape, f"{seconds:.7f}"))
        print(name, "round", number, f"{time.perf_counter() - STARTED:.0f} s", flush=True)
        if time.perf_counter() - STARTED > LIMIT_S:
            break
    close(backend)


STARTED, LIMIT_S = time.perf_counter(), 480.0


def main() -> None:
    """Measure every model and write in_flight.csv."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    gc.disable()
    with open(folder / "in_flight.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for name in sys.argv[2:] or ("llama-3.1-8b", "llama2-7b"):
            if name == "micro":  # a check on the CPU
                few = [Point("mixed", 1, 20, 0, 3, 16), Point("decode", decoding=4, context=16)]
                session(name, 2000, 1, writer.writerow, few)
            else:
                session(name, 20000 if name == "llama-3.1-8b" else 9000, 3, writer.writerow, points())
            file.flush()


if __name__ == "__main__":
    main()

"""Check the torch backend on a device against float32, and time its steps: the tables to read before a profile is made.

    python benchmarks/gpu_check.py [--device cuda] [--model llama2-7b] [--blocks 8192] [--out DIR] [--only NAME ...]

Needs torch, numpy and this repository, which need not be installed. Times are wall milliseconds of whole steps.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gpu_bench import Bench, TorchBackend, clocked, device_time, median, spread, torch
from servesim.calibrate.device.backend import MODELS, Model, OutOfMemory
from servesim.calibrate.device.self_test import PagedRun, ScriptedRequest


def check_scores(model: Model, device: str, length: int, rows: int, **options: Any) -> dict[str, Any]:
    """Run random requests on a fresh backend and compare every row with float32."""
    backend = TorchBackend(device, **options)
    began = time.perf_counter()
    backend.load(model, 512, 16, 128)
    seconds = time.perf_counter() - began
    run, rng = PagedRun(backend, 3, poison=True), random.Random(5)
    here: list[ScriptedRequest] = []
    away: list[ScriptedRequest] = []
    while run.rows < rows:
        if len(here) < 6 and (not away or rng.random() < 0.6):
            request = run.begin(rng.randrange(1, length))
            if request.pending > 40:
                run.step({request: request.pending // 3})
            run.step({request: request.pending, **dict.fromkeys(here[:2], 1)})
            here.append(request)
        elif away:
            here.append(away.pop(0))
            run.swap_in(here[-1])
        run.decode(*here)
        if len(here) > 3:
            away.append(here.pop(rng.randrange(len(here))))
            run.swap_out(away[-1])
        if len(away) > 2:
            run.swap_in(away[0])
            run.finish(away.pop(0))
    seen = run.compare()
    return {
        "load_s": seconds,
        "graphs": len(backend.graphs),
        "rows": len(seen.errors),
        "mean": float(np.mean(seen.errors)),
        "worst": float(np.max(seen.errors)),
        "distance": seen.distance,
        "missed": seen.missed,
        "lost": seen.lost,
    }


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Compare small float32 models and the model itself with float32; the reference kernels show what rounding does."""
    grouped = Model("grouped", 2, 256, 8, 2, 512, 1000, 2048)
    few = {"gears": (1, 2, 4, 8), "token_gears": (16, 64, 256)}
    found = {
        "tiny": check_scores(MODELS["tiny"], args.device, 400, 150, **few),
        "grouped": check_scores(grouped, args.device, 400, 100, **few),
        args.model: check_scores(MODELS[args.model], args.device, 400, 60, **few),
        "  its reference": check_scores(MODELS[args.model], args.device, 400, 60, kernels="reference", **few),
    }
    print("against float32   rows  mean error     worst  distance  missed      by  load s  graphs")
    for name, seen in found.items():
        print(
            f"{name:16} {seen['rows']:5} {seen['mean']:11.2e} {seen['worst']:9.2e} {seen['distance']:9.2e}"
            f" {seen['missed']:7} {seen['lost']:7.1e} {seen['load_s']:7.1f} {seen['graphs']:7}"
        )
    return found


def decode(bench: Bench, repeats: int) -> dict[str, Any]:
    """Time decodes by gear and context."""
    backend = bench.backend
    longest = backend.model.context - 1
    contexts = [context for context in (32, 128, 512, 1024, 2040) if context <= longest]
    room = backend.blocks * backend.block_size
    shapes = {
        (gear, context): [(1, context)] * gear
        for gear in backend.packer.gears
        for context in contexts
        if gear * context <= 1.2 * room
    }
    times = bench.shuffled(shapes, repeats)
    print("\ndecode: median ms (p90/median)\n  rows" + "".join(f"{context:>17}" for context in contexts))
    for gear in backend.packer.gears:
        cells = [times.get((gear, context)) for context in contexts]
        print(f"{gear:6}" + "".join(f"{median(t):8.3f} ({spread(t):.3f})".rjust(17) if t else "" for t in cells))
    return {f"{gear}x{context}": seen for (gear, context), seen in times.items()}


def prefill(bench: Bench, repeats: int) -> dict[str, Any]:
    """Time prompts by tokens and rows, with and without graphs; long ones apart, since they heat the chip."""
    backend = bench.backend
    longest = min(backend.model.context, backend.blocks * backend.block_size)
    gears = backend.packer.token_gears
    totals = [*(total for gear in gears for total in (gear - 6, gear)), 768, 1024, 2048, 4096]
    shapes = {
        (total, rows): [(total // rows, 0)] * rows
        for total in totals
        for rows in (1, 4, 8)
        if total <= longest and total // rows > 1
    }
    short = {shape: chunks for shape, chunks in shapes.items() if shape[0] <= gears[-1]}
    times = bench.shuffled(short, repeats)
    times.update(bench.shuffled({shape: chunks for shape, chunks in shapes.items() if shape not in short}, repeats))
    graphs, backend.graphs = backend.graphs, {}
    eager = bench.shuffled(short, repeats // 4 + 1)
    backend.graphs = graphs
    print("\nprefill: median ms (p90/median) in 1, 4 and 8 rows; then the same without graphs")
    for total in totals:
        cells = [kind.get((total, rows)) for kind in (times, eager) for rows in (1, 4, 8)]
        print(f"{total:6}" + "".join(f"{median(t):8.3f} ({spread(t):.3f})".rjust(17) if t else "" for t in cells))
    return {f"{total}in{rows}": seen for (total, rows), seen in times.items()}


def mixed(bench: Bench, repeats: int) -> dict[str, Any]:
    """Time prompt chunks and decodes in one step."""
    shapes = {
        f"chunk {chunk} at {before} + {rows} decodes at {context}": [(chunk, before)] + [(1, context)] * rows
        for chunk, before in ((64, 0), (256, 0), (256, 256), (480, 0))
        for rows, context in ((1, 300), (31, 300), (127, 300))
        if max(chunk + before, context) < bench.backend.model.context
    }
    times = bench.shuffled(shapes, repeats)
    print("\nmixed: median ms (p90/median)")
    for name, seen in times.items():
        print(f"  {name:48} {median(seen):9.3f} ({spread(seen):5.3f})")
    return times


def uneven(rng: random.Random, kind: int, mean: int, longest: int) -> int:
    """Draw a context: all alike, uniform, or exponential."""
    return (mean, rng.randrange(1, 2 * mean), min(longest, int(rng.expovariate(1 / mean)) + 1))[kind]


def linear(bench: Bench, repeats: int) -> dict[str, Any]:
    """See whether a decode follows its sum of contexts, however uneven they are: a + d x sum, fitted on half."""
    rng, found = random.Random(9), {}
    longest = min(2000, bench.backend.model.context - 1)
    print("\ndecode = a + d x sum of contexts; error on the held-out half")
    for gear in (gear for gear in bench.backend.packer.gears if gear >= 4):
        shapes = {}
        for index in range(24):
            mean = rng.randrange(40, longest // 3)
            shapes[index] = [(1, uneven(rng, index % 3, mean, longest)) for _ in range(gear)]
        times = bench.shuffled(shapes, repeats // 3 + 1)
        sums = np.array([sum(context for _, context in shapes[index]) for index in shapes], float)
        seen = np.array([median(times[index]) for index in shapes])
        slope, start = np.polyfit(sums[::2], seen[::2], 1)
        errors = np.abs((start + slope * sums[1::2]) / seen[1::2] - 1)
        line = f"{start:.3f} ms + {1e6 * slope:.1f} ns a token"
        print(f"{gear:6} rows: {line}; error {errors.mean():.2%}, worst {errors.max():.2%}")
        found[str(gear)] = {"sums": sums.tolist(), "ms": seen.tolist(), "error": errors.tolist()}
    return found


def host(bench: Bench, repeats: int) -> dict[str, Any]:
    """Split a decode step into what the host does: pack, copy, start the graph, wait; and the device's own time."""
    backend, found = bench.backend, {}
    llama = backend.loaded
    if not backend.graphs or llama is None:
        return {}
    print("\nhost: ms (p90/median) of pack, copy, start, wait; of the whole step; of the device alone")
    for gear in (gear for gear in backend.packer.gears if gear in (1, 32, 128, 256)):
        rows = bench.rows([(1, 300)] * gear)
        graph = backend.graphs[backend.packer.form(gear, gear, gear)]
        used = backend.packer.pack(rows).used
        parts: list[Callable[[], Any]] = [
            lambda rows=rows: backend.packer.pack(rows),
            lambda used=used: backend.ints[:used].copy_(backend.staging[:used], non_blocking=True),
            graph.replay,
            lambda gear=gear: backend.fetch(llama.winners, gear),
        ]
        times = [[clocked(part) for part in parts] for _ in range(repeats)]
        whole = [clocked(lambda rows=rows: backend.step(rows)) for _ in range(repeats)]
        device = device_time(graph.replay, repeats)
        seen = [[turn[index] for turn in times] for index in range(4)] + [whole, device]
        print(f"{gear:6} rows:", *(f"{median(part):.3f} ({spread(part):.3f})" for part in seen))
        found[str(gear)] = seen
    return found


def swap(bench: Bench, repeats: int) -> dict[str, Any]:
    """Time block copies both ways."""
    backend, found = bench.backend, {}
    size = backend.loaded.cache[0].nbytes if backend.loaded else 0

    def copied(copy: Callable[[Any], None], sources: list[int], targets: list[int]) -> float:
        backend.synchronize()
        return clocked(lambda: (copy(list(zip(sources, targets))), backend.synchronize()))

    print("\nswap: blocks, ms out and in (p90/median), GB/s out and in")
    for count in (count for count in (1, 4, 16, 64) if count <= len(backend.host)):
        out, back = [], []
        for _ in range(repeats):
            device = bench.rng.sample(range(backend.blocks), count)
            away = bench.rng.sample(range(len(backend.host)), count)
            out.append(copied(backend.swap_out, device, away))
            back.append(copied(backend.swap_in, away, device))
        rates = [count * size / median(times) / 1e6 for times in (out, back)]
        cells = [f"{median(times):9.3f} ({spread(times):.3f})" for times in (out, back)]
        print(f"{count:6} {cells[0]} {cells[1]} {rates[0]:6.1f} {rates[1]:6.1f}")
        found[str(count)] = {"out": out, "in": back}
    return found


def steady(bench: Bench, repeats: int) -> dict[str, Any]:
    """Run one batch of 64 for many steps in a row, as a server would, and see how even the steps are."""
    rows = bench.rows([(1, 200)] * min(64, bench.backend.packer.gears[-1]))
    times = [clocked(lambda: bench.backend.step(rows)) for _ in range(20 * repeats)]
    marks = (0, 1, 50, 90, 99, 99.9, 100)
    cells = zip(marks, np.percentile(times[10:], marks))
    print(f"\nsteady: {len(times)} steps, ms: " + ", ".join(f"p{mark} {value:.3f}" for mark, value in cells))
    return {"ms": times}


def exhaust(bench: Bench, repeats: int) -> dict[str, Any]:
    """Fill the device's memory, run a step that cannot fit, see that the next one works."""
    backend = bench.backend
    if not backend.cuda:
        return {}
    row = bench.rows([(30, 0)])
    expected = backend.step(row)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(free - (1 << 30), dtype=torch.uint8, device=backend.device)
    try:
        backend.step(bench.rows([(4000, 0)] * 16))
        outcome = "fitted"
    except OutOfMemory as error:
        outcome = f"OutOfMemory: {error}"[:100]
    again = backend.step(row) == expected
    del hog
    torch.cuda.empty_cache()
    print(f"\nout of memory: {outcome}; the next step {'is right' if again else 'IS WRONG'}")
    return {"outcome": outcome, "again": again}


def clocks() -> str:
    """Return the chip's clock, power and temperature just now."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    return "; " + subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


PARTS = {f.__name__: f for f in (host, decode, prefill, mixed, linear, swap, steady, exhaust)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="llama2-7b", choices=sorted(MODELS))
    parser.add_argument("--blocks", type=int, default=8192, help="of 16 tokens, for the timings")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=["check", *PARTS], help=f"of check, {', '.join(PARTS)}")
    parser.add_argument("--out", help="folder for gpu_check.json")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if "check" in args.only:
        found["check"] = check(args)
    backend = TorchBackend(args.device)
    began = time.perf_counter()
    backend.load(MODELS[args.model], args.blocks, 16, 64)
    found["describe"] = backend.describe()
    print(f"\n{found['describe']}\nloaded in {time.perf_counter() - began:.1f} s")
    bench = Bench(backend)
    for name, part in PARTS.items():
        if name in args.only:
            began = time.perf_counter()
            found[name] = part(bench, args.repeats)
            print(f"[{name}: {time.perf_counter() - began:.1f} s{clocks() if backend.cuda else ''}]", flush=True)
    if args.out:
        Path(args.out, "gpu_check.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

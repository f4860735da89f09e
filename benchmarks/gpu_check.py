"""Check the torch backend on a device against float32, and time its steps. Run it before you measure a profile.

    python benchmarks/gpu_check.py [--device cuda] [--model llama2-7b] [--blocks 8192] [--out DIR] [--only NAME ...]

It needs torch, numpy and this repository (no installation). Times are wall-clock milliseconds of whole steps.
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
from gpu_bench import ROOT, Bench, TorchBackend, device_time, median, spread, time_ms, torch
from servesim.calibrate.device.backend import MODELS, Model, OutOfMemory

sys.path.append(str(ROOT / "tests" / "calibrate" / "device"))
from paged_runs import PagedRun, ScriptedRequest


def check_scores(model: Model, device: str, length: int, rows: int, **options: Any) -> dict[str, Any]:
    """Run random requests on a new backend and compare the logits of every row with float32."""
    backend = TorchBackend(device, **options)
    start = time.perf_counter()
    backend.load(model, 512, 16, 128)
    seconds = time.perf_counter() - start
    run, rng = PagedRun(backend, 3, poison=True), random.Random(5)
    on_device: list[ScriptedRequest] = []
    on_host: list[ScriptedRequest] = []
    while run.rows < rows:
        if len(on_device) < 6 and (not on_host or rng.random() < 0.6):
            request = run.add_request(rng.randrange(1, length))
            if request.pending > 40:
                run.step({request: request.pending // 3})
            run.step({request: request.pending, **dict.fromkeys(on_device[:2], 1)})
            on_device.append(request)
        elif on_host:
            on_device.append(on_host.pop(0))
            run.swap_in(on_device[-1])
        run.decode(*on_device)
        if len(on_device) > 3:
            on_host.append(on_device.pop(rng.randrange(len(on_device))))
            run.swap_out(on_host[-1])
        if len(on_host) > 2:
            run.swap_in(on_host[0])
            run.finish(on_host.pop(0))
    result = run.compare()
    return {
        "load_s": seconds,
        "graphs": len(backend.graphs),
        "rows": len(result.errors),
        "mean": float(np.mean(result.errors)),
        "worst": float(np.max(result.errors)),
        "distance": result.max_difference,
        "missed": result.wrong_tokens,
        "lost": result.max_logit_gap,
    }


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Compare two small models and the chosen model with float32; the reference kernels show the rounding error."""
    grouped = Model("grouped", 2, 256, 8, 2, 512, 1000, 2048)
    buckets = {"row_buckets": (1, 2, 4, 8), "token_buckets": (16, 64, 256)}
    results = {
        "tiny": check_scores(MODELS["tiny"], args.device, 400, 150, **buckets),
        "grouped": check_scores(grouped, args.device, 400, 100, **buckets),
        args.model: check_scores(MODELS[args.model], args.device, 400, 60, **buckets),
        "  its reference": check_scores(MODELS[args.model], args.device, 400, 60, kernels="reference", **buckets),
    }
    print("against float32   rows  mean error     worst  distance  missed      by  load s  graphs")
    for name, result in results.items():
        print(
            f"{name:16} {result['rows']:5} {result['mean']:11.2e} {result['worst']:9.2e} {result['distance']:9.2e}"
            f" {result['missed']:7} {result['lost']:7.1e} {result['load_s']:7.1f} {result['graphs']:7}"
        )
    return results


def decode(bench: Bench, repeats: int) -> dict[str, Any]:
    """Time decodes by padding bucket and context."""
    backend = bench.backend
    contexts = [context for context in (32, 128, 512, 1024, 2040) if context < backend.model.context]
    pool_tokens = backend.blocks * backend.block_size
    shapes = {
        (rows, context): [(1, context)] * rows
        for rows in backend.packer.row_buckets
        for context in contexts
        if rows * context <= 1.2 * pool_tokens
    }
    times = bench.time_shuffled(shapes, repeats)
    print("\ndecode: median ms (p90/median)\n  rows" + "".join(f"{context:>17}" for context in contexts))
    for rows in backend.packer.row_buckets:
        cells = [times.get((rows, context)) for context in contexts]
        print(f"{rows:6}" + "".join(f"{median(t):8.3f} ({spread(t):.3f})".rjust(17) if t else "" for t in cells))
    return {f"{rows}x{context}": values for (rows, context), values in times.items()}


def prefill(bench: Bench, repeats: int) -> dict[str, Any]:
    """Time prefills by tokens and rows, with and without graphs; long ones separately, because they heat the chip."""
    backend = bench.backend
    max_tokens = min(backend.model.context, backend.blocks * backend.block_size)
    buckets = backend.packer.token_buckets
    totals = [*(total for bucket in buckets for total in (bucket - 6, bucket)), 768, 1024, 2048, 4096]
    shapes = {
        (total, rows): [(total // rows, 0)] * rows
        for total in totals
        for rows in (1, 4, 8)
        if total <= max_tokens and total // rows > 1
    }
    short = {shape: chunks for shape, chunks in shapes.items() if shape[0] <= buckets[-1]}
    times = bench.time_shuffled(short, repeats)
    times.update(
        bench.time_shuffled({shape: chunks for shape, chunks in shapes.items() if shape not in short}, repeats)
    )
    graphs, backend.graphs = backend.graphs, {}
    eager = bench.time_shuffled(short, repeats // 4 + 1)
    backend.graphs = graphs
    print("\nprefill: median ms (p90/median) in 1, 4 and 8 rows; then the same without graphs")
    for total in totals:
        cells = [kind.get((total, rows)) for kind in (times, eager) for rows in (1, 4, 8)]
        print(f"{total:6}" + "".join(f"{median(t):8.3f} ({spread(t):.3f})".rjust(17) if t else "" for t in cells))
    return {f"{total}in{rows}": values for (total, rows), values in times.items()}


def mixed(bench: Bench, repeats: int) -> dict[str, Any]:
    """Time mixed steps: one prompt chunk and several decodes."""
    shapes = {
        f"chunk {chunk} at {before} + {rows} decodes at {context}": [(chunk, before)] + [(1, context)] * rows
        for chunk, before in ((64, 0), (256, 0), (256, 256), (480, 0))
        for rows, context in ((1, 300), (31, 300), (127, 300))
        if max(chunk + before, context) < bench.backend.model.context
    }
    times = bench.time_shuffled(shapes, repeats)
    print("\nmixed: median ms (p90/median)")
    for name, values in times.items():
        print(f"  {name:48} {median(values):9.3f} ({spread(values):5.3f})")
    return times


def draw_context(rng: random.Random, kind: int, mean: int, max_context: int) -> int:
    """Draw a context length: 0 constant, 1 uniform, 2 exponential."""
    return (mean, rng.randrange(1, 2 * mean), min(max_context, int(rng.expovariate(1 / mean)) + 1))[kind]


def linear(bench: Bench, repeats: int) -> dict[str, Any]:
    """Fit decode time = a + d x sum of contexts to half of the shapes; print the error on the other half."""
    rng, results = random.Random(9), {}
    max_context = min(2000, bench.backend.model.context - 1)
    print("\ndecode = a + d x sum of contexts; error on the held-out half")
    for rows in (rows for rows in bench.backend.packer.row_buckets if rows >= 4):
        shapes = {}
        for index in range(24):
            mean = rng.randrange(40, max_context // 3)
            shapes[index] = [(1, draw_context(rng, index % 3, mean, max_context)) for _ in range(rows)]
        times = bench.time_shuffled(shapes, repeats // 3 + 1)
        sums = np.array([sum(context for _, context in shapes[index]) for index in shapes], float)
        medians = np.array([median(times[index]) for index in shapes])
        slope, intercept = np.polyfit(sums[::2], medians[::2], 1)
        errors = np.abs((intercept + slope * sums[1::2]) / medians[1::2] - 1)
        formula = f"{intercept:.3f} ms + {1e6 * slope:.1f} ns per token"
        print(f"{rows:6} rows: {formula}; mean error {errors.mean():.2%}, worst {errors.max():.2%}")
        results[str(rows)] = {"sums": sums.tolist(), "ms": medians.tolist(), "error": errors.tolist()}
    return results


def host(bench: Bench, repeats: int) -> dict[str, Any]:
    """Split a decode step into host work (pack, copy, start the graph, wait) and device time."""
    backend, results = bench.backend, {}
    llama = backend.loaded
    if not backend.graphs or llama is None:
        return {}
    print("\nhost: ms (p90/median) of pack, copy, start, wait, the whole step, the device alone")
    for count in (count for count in backend.packer.row_buckets if count in (1, 32, 128, 256)):
        rows = bench.rows([(1, 300)] * count)
        graph = backend.graphs[backend.packer.graph_shape(count, count, count)]
        used = backend.packer.pack(rows).used
        phases: list[Callable[[], Any]] = [
            lambda rows=rows: backend.packer.pack(rows),
            lambda used=used: backend.ints[:used].copy_(backend.staging[backend.buffer][:used], non_blocking=True),
            graph.replay,
            lambda count=count: backend.selection.read_tokens(llama.next_tokens[:count]),
        ]
        times = [[time_ms(phase) for phase in phases] for _ in range(repeats)]
        whole = [time_ms(lambda rows=rows: backend.step(rows)) for _ in range(repeats)]
        device = device_time(graph.replay, repeats)
        columns = [[repeat[index] for repeat in times] for index in range(4)] + [whole, device]
        print(f"{count:6} rows:", *(f"{median(column):.3f} ({spread(column):.3f})" for column in columns))
        results[str(count)] = columns
    return results


def swap(bench: Bench, repeats: int) -> dict[str, Any]:
    """Time block copies to the host and back."""
    backend, results = bench.backend, {}
    size = backend.loaded.cache[0].nbytes if backend.loaded else 0

    def time_copy(copy: Callable[[Any], None], sources: list[int], targets: list[int]) -> float:
        backend.synchronize()
        return time_ms(lambda: (copy(list(zip(sources, targets))), backend.synchronize()))

    print("\nswap: blocks, ms out and in (p90/median), GB/s out and in")
    for count in (count for count in (1, 4, 16, 64) if count <= len(backend.host)):
        out, back = [], []
        for _ in range(repeats):
            device = bench.rng.sample(range(backend.blocks), count)
            host_blocks = bench.rng.sample(range(len(backend.host)), count)
            out.append(time_copy(backend.swap_out, device, host_blocks))
            back.append(time_copy(backend.swap_in, host_blocks, device))
        rates = [count * size / median(times) / 1e6 for times in (out, back)]
        cells = [f"{median(times):9.3f} ({spread(times):.3f})" for times in (out, back)]
        print(f"{count:6} {cells[0]} {cells[1]} {rates[0]:6.1f} {rates[1]:6.1f}")
        results[str(count)] = {"out": out, "in": back}
    return results


def steady(bench: Bench, repeats: int) -> dict[str, Any]:
    """Run the same batch of 64 for many steps, as a server does, and print the quantiles of the step time."""
    rows = bench.rows([(1, 200)] * min(64, bench.backend.packer.row_buckets[-1]))
    times = [time_ms(lambda: bench.backend.step(rows)) for _ in range(20 * repeats)]
    percents = (0, 1, 50, 90, 99, 99.9, 100)
    cells = zip(percents, np.percentile(times[10:], percents))
    print(f"\nsteady: {len(times)} steps, ms: " + ", ".join(f"p{percent} {value:.3f}" for percent, value in cells))
    return {"ms": times}


def exhaust(bench: Bench, repeats: int) -> dict[str, Any]:
    """Fill the device memory, run a step that cannot fit, and check that the next step works."""
    backend = bench.backend
    if not backend.cuda:
        return {}
    row = bench.rows([(30, 0)])
    expected = backend.step(row)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    filler = torch.empty(free - (1 << 30), dtype=torch.uint8, device=backend.device)
    try:
        backend.step(bench.rows([(4000, 0)] * 16))
        outcome = "fitted"
    except OutOfMemory as error:
        outcome = f"OutOfMemory: {error}"[:100]
    correct = backend.step(row) == expected
    del filler
    torch.cuda.empty_cache()
    print(f"\nout of memory: {outcome}; the next step is {'correct' if correct else 'WRONG'}")
    return {"outcome": outcome, "again": correct}


def clocks() -> str:
    """Return the clock, power and temperature of the chip."""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    return "; " + subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


CHECKS = {f.__name__: f for f in (host, decode, prefill, mixed, linear, swap, steady, exhaust)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="llama2-7b", choices=sorted(MODELS))
    parser.add_argument(
        "--blocks", type=int, default=8192, help="KV blocks of 16 tokens for the timings (default 8192)"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--only", nargs="*", default=["check", *CHECKS], help=f"checks to run: check, {', '.join(CHECKS)} (default all)"
    )
    parser.add_argument("--out", help="folder to write gpu_check.json to")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    if "check" in args.only:
        results["check"] = check(args)
    backend = TorchBackend(args.device)
    start = time.perf_counter()
    backend.load(MODELS[args.model], args.blocks, 16, 64)
    results["describe"] = backend.describe()
    print(f"\n{results['describe']}\nloaded in {time.perf_counter() - start:.1f} s")
    bench = Bench(backend)
    for name, run_check in CHECKS.items():
        if name in args.only:
            start = time.perf_counter()
            results[name] = run_check(bench, args.repeats)
            print(f"[{name}: {time.perf_counter() - start:.1f} s{clocks() if backend.cuda else ''}]", flush=True)
    if args.out:
        Path(args.out, "gpu_check.json").write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

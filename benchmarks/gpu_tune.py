"""Time launch settings of the paged attention kernel on a CUDA device: python benchmarks/gpu_tune.py

The best ones belong into calibrate/device/torch/fused_operators.py.
"""

from __future__ import annotations

import random
import statistics
import sys

from gpu_bench import device_time, torch
from servesim.calibrate.device.backend import MODELS, Row
from servesim.calibrate.device.torch.fused_operators import FusedOperators, Launch
from servesim.calibrate.device.torch.operators import Batch, ReferenceOperators
from servesim.calibrate.device.torch.packing import Packer

BLOCKS = 16384
CHECKED = ("8x500", "256at2048")  # also compared with the reference operators
SKEWED = [1 + int(random.Random(row).expovariate(1 / 300)) for row in range(256)]
DECODES = {"1x2000": [(1, 2000)], "8x500": [(1, 500)] * 8, "24x300": [(1, 300)] * 24, "32x300": [(1, 300)] * 32,
           "64x300": [(1, 300)] * 64, "128x300": [(1, 300)] * 128, "128x1000": [(1, 1000)] * 128,
           "256x100": [(1, 100)] * 256, "24skew": [(1, context) for context in SKEWED[:24]],
           "128skew": [(1, context) for context in SKEWED[:128]]}  # fmt: skip
PROMPTS = {"8x20": [(20, 0)] * 8, "1x512": [(512, 0)], "8x512": [(512, 0)] * 8, "1x2048": [(2048, 0)],
           "256at2048": [(256, 2048)]}  # fmt: skip
SPLITS = [
    (Launch(16, 64, *rest), split)
    for rest in ((2, 3, 4), (2, 3, 5), (2, 3, 3), (2, 2, 6), (4, 2, 5), (1, 3, 5))
    for split in (256, 512)
]
TILES = [(Launch(64, 64, 4, 3, 2), 256), (Launch(64, 64, 4, 4, 2), 256), (Launch(64, 32, 4, 3, 3), 256),
         (Launch(128, 64, 8, 3, 1), 256), (Launch(128, 64, 8, 4, 1), 256)]  # fmt: skip


class Trial:
    """One layer of KV cache with random content, and rows in random blocks."""

    def __init__(self) -> None:
        self.model, self.device, self.rng = MODELS["llama2-7b"], torch.device("cuda"), random.Random(1)
        dim = self.model.hidden // self.model.heads
        shape = (BLOCKS + 1, 2, 16, self.model.kv_heads, dim)
        self.cache = torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_()
        self.qkv = torch.empty(8192, 3 * self.model.hidden, dtype=torch.bfloat16, device=self.device).normal_()

    def run(
        self, launch: Launch, split: int, chunks: list[tuple[int, int]], exact: bool = False
    ) -> tuple[float, float]:
        """Return the microseconds of one attention call, and its error against the reference operators."""
        fused = FusedOperators(self.model, 16, self.device, split)
        fused.tiles, fused.splits, fused.tile = launch, launch, launch.lanes
        fused.max_units = split // launch.keys
        blocks = iter(self.rng.sample(range(BLOCKS), BLOCKS))
        rows = [Row([1] * n, before, [next(blocks) for _ in range(-(-(n + before) // 16))]) for n, before in chunks]
        batch = self.batch(rows, fused.tile)
        fused.begin(batch)
        out = fused.attend(self.qkv, self.cache, batch)
        error = 0.0
        if exact:
            plain = ReferenceOperators(self.model, 16, self.device)
            queries = self.qkv[: batch.shape.tokens].view(batch.shape.tokens, -1, plain.head_dim)[:, : self.model.heads]
            whole = self.batch(rows, 4096)
            expected = plain.attend(queries.float(), self.cache.float(), whole)
            error = float((out.float() - expected).norm() / expected.norm())
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(4):
                fused.attend(self.qkv, self.cache, batch)
        graph.replay()
        return 250 * statistics.median(device_time(graph.replay, 12)), error

    def batch(self, rows: list[Row], tile: int) -> Batch:
        staging = torch.zeros(1 << 18, dtype=torch.int32)
        packer = Packer(staging.numpy(), BLOCKS, 16, 4096, 32000, tile, [1], [1])
        form, _, _ = packer.pack(rows)
        return Batch(form, staging.to(self.device))


def compare(title: str, settings: list[tuple[Launch, int]], shapes: dict[str, list[tuple[int, int]]]) -> None:
    """Print one line per launch setting, with the error of one that does not compile or fit."""
    trial = Trial()
    print(f"\n{title}: us of one layer\n{'lanes keys warps stages resident split':40}", *(f"{n:>9}" for n in shapes))
    for launch, split in settings:
        first = launch == settings[0][0]
        try:
            results = [trial.run(launch, split, chunks, first and name in CHECKED) for name, chunks in shapes.items()]
        except Exception as error:
            print(f"{(*launch, split)!s:40} {type(error).__name__}: {str(error)[:60]}")
            continue
        worst = max(error for _, error in results)
        print(f"{(*launch, split)!s:40}", *(f"{us:9.1f}" for us, _ in results), f" error {worst:.1e}", flush=True)


def main() -> int:
    compare("splits", SPLITS, DECODES)
    compare("tiles", TILES, PROMPTS)
    floor = {name: sum(context + 1 for _, context in chunks) * 16384 / 4.3e6 for name, chunks in DECODES.items()}
    print("at 4.3 TB/s: " + ", ".join(f"{name} {us:.1f}" for name, us in floor.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

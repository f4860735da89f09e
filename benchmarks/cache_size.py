"""TTFT, throughput and hit rate over the size of the prefix cache, for a trace with hash ids.

Run: python benchmarks/cache_size.py mooncake_conversation.csv.gz [--picture docs/pictures/prefix-cache.png]

Every size is simulated with the cache and without it. The KV cache of a real GPU is one point of the axis; more blocks
stand for more memory: a larger GPU, or smaller weights.
"""

from __future__ import annotations

import argparse
from typing import Any

import pandas as pd
import servesim

SIZES = (10_000, 20_000, 40_000, 80_000, 160_000, 320_000, 640_000, 1_280_000)  # KV blocks of 16 tokens
COLUMNS = ("prefix_hit_rate", "mean_ttft_ms", "output_throughput")


def simulate(trace: str, requests: int, rate: float, sizes: tuple[int, ...]) -> pd.DataFrame:
    """Return one row per size and setting of the cache."""
    rows: list[dict[str, Any]] = []
    for blocks in sizes:
        for on in (True, False):
            result = servesim.run(
                policy={"name": "vllm-v1", "max_num_batched_tokens": 8192, "enable_prefix_caching": on},
                trace={"path": trace, "limit": requests, "rate": rate},
                profile="h200-llama2-7b",
                engine={"num_blocks": blocks},
            )
            rows.append({"blocks": blocks, "cache": on, **{name: result.metrics.get(name) for name in COLUMNS}})
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame, picture: str) -> None:
    """Draw mean TTFT and throughput over the number of blocks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from servesim.files.chart_style import LIGHT, matplotlib_style

    with matplotlib_style():
        figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4))
        for on, colour, label in ((True, LIGHT["winner"], "prefix cache"), (False, LIGHT["baseline"], "without")):
            rows = table[table["cache"] == on]
            left.plot(rows["blocks"], rows["mean_ttft_ms"] / 1000, marker="o", color=colour, label=label)
            right.plot(rows["blocks"], rows["output_throughput"], marker="o", color=colour, label=label)
        left.set(xscale="log", yscale="log", xlabel="KV blocks of 16 tokens", ylabel="mean TTFT (s)")
        right.set(xscale="log", xlabel="KV blocks of 16 tokens", ylabel="output tokens per second")
        left.legend(frameon=False)
        figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", help="trace with hash ids, for example Mooncake's conversation trace")
    parser.add_argument("--requests", type=int, default=12_031)
    parser.add_argument("--rate", type=float, default=1.2, help="requests per second")
    parser.add_argument("--picture", help="write the figure to this file")
    args = parser.parse_args()
    table = simulate(args.trace, args.requests, args.rate, SIZES)
    print(table.to_string(index=False))
    if args.picture:
        draw(table, args.picture)


if __name__ == "__main__":
    main()

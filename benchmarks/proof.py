"""Predict runs that other people measured, and compare the errors with those of other simulators.

    python benchmarks/proof.py [DATA] [--only NAME ...]      default of DATA: ../shared/data

Each set is calibrated on a stated part and predicts the rest. A set whose data is absent is skipped. The result is
benchmarks/results/proof.csv; `--only` replaces the rows of these sets. `python tools/generate_tables.py` and
`python tools/doc_charts.py proof` renew docs/proof.md from it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from proof_blis import predict_blis
from proof_budget import predict_budget
from proof_closed import predict_gpt_oss, predict_trainium
from proof_curves import predict_dense, predict_experts
from proof_layers import predict_layers
from proof_prefix import predict_pulse
from proof_rows import Family, median_error, read_rows, write_rows
from proof_warm_cache import predict_llama_70b
from proof_watermark import predict_watermark

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "proof.csv"
# Name for --only, folder or file of the data that the set needs, and its function.
SETS: dict[str, tuple[str, Family]] = {
    "prefix": ("measured/llmservingsim-ispass26", predict_pulse),
    "blis-h100": ("measured/blis-h100", predict_blis),
    "budget": ("measured/published/vllm-0.22-budget.csv", predict_budget),
    "curves": ("measured/aiconfigurator-silicon", predict_dense),
    "curves-moe": ("measured/aiconfigurator-silicon", predict_experts),
    "layers": ("measured/llmservingsim-rtxpro6000", predict_layers),
    "gpt-oss": ("measured/published/vllm-0.22-gptoss-h200.md", predict_gpt_oss),
    "llama-70b": ("measured/published/vllm-0.14-llama70b-h200.md", predict_llama_70b),
    "trainium": ("measured/published/vllm-neuron-prefill-first.md", predict_trainium),
    "watermark": ("measured/published/vllm-44594-watermark.md", predict_watermark),
}


def main() -> int:
    """Run the sets, print their median errors and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--only", nargs="+", choices=SETS, default=list(SETS), metavar="NAME", help=", ".join(SETS))
    chosen = parser.parse_args()
    for name in chosen.only:
        needs, predict = SETS[name]
        if not (chosen.data / needs).exists():
            print(f"{name}: skipped, {chosen.data / needs} is absent", file=sys.stderr)
            continue
        start = time.perf_counter()
        new = predict(chosen.data)
        names = {row.set for row in new}
        rows = [row for row in (read_rows(RESULT) if RESULT.is_file() else []) if row.set not in names] + new
        print(f"{name}: {len(new)} figures, median error {median_error(new):.2%}, {time.perf_counter() - start:.0f} s")
        write_rows(RESULT, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

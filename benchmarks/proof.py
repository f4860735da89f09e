"""Predict runs that other people measured, and compare the errors with those of other simulators.

    python benchmarks/proof.py [DATA] [--only NAME ...]      default of DATA: ../shared/data

Each set is calibrated on a stated part and predicts the rest. A set whose data is absent is skipped. The result is
benchmarks/results/proof.csv, and the tables and the picture of docs/proof.md; `--only` replaces the rows of these sets.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from proof_ascend import predict_gpustack, predict_mindie_pair
from proof_blis import predict_blis
from proof_budget import predict_budget
from proof_closed import predict_gpt_oss, predict_trainium
from proof_curves import predict_dense, predict_experts
from proof_derive import predict_blis_validation
from proof_layers import predict_layers
from proof_load import predict_ascend, predict_seed_oss
from proof_prefix import predict_pulse
from proof_rows import Family, Row, coverage, median_error, read_rows, write_rows
from proof_series import predict_qwen, predict_series
from proof_sglang import predict_sglang
from proof_speculation import predict_suffix
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
    "derive": ("measured/blis-validation", predict_blis_validation),
    "layers": ("measured/llmservingsim-rtxpro6000", predict_layers),
    "ascend": ("measured/vllm-ascend-docs", predict_ascend),
    "gpustack": ("ascend-public/gpustack_910b.csv", predict_gpustack),
    "gpt-oss": ("measured/published/vllm-0.22-gptoss-h200.md", predict_gpt_oss),
    "llama-70b": ("measured/published/vllm-0.14-llama70b-h200.md", predict_llama_70b),
    "mindie-pair": ("ascend-public/scheduler_pairs.csv", predict_mindie_pair),
    "qwen3-30b": ("measured/llmservingsim-rtxpro6000", predict_qwen),
    "seed-oss": ("measured/published/vllm-neuron-prefill-first.md", predict_seed_oss),
    "series": ("measured/llmservingsim-ispass26", predict_series),
    "sglang": ("measured/published/sglang-0.5.18-rtx4090.md", predict_sglang),
    "suffix": ("measured/vllm-ascend-docs", predict_suffix),
    "trainium": ("measured/published/vllm-neuron-prefill-first.md", predict_trainium),
    "watermark": ("measured/published/vllm-44594-watermark.md", predict_watermark),
}


def main() -> int:
    """Run the sets in parallel, print their median errors and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--only", nargs="+", choices=SETS, default=list(SETS), metavar="NAME", help=", ".join(SETS))
    chosen = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        runs = {pool.submit(run_set, name, chosen.data): name for name in chosen.only if has_data(name, chosen.data)}
        for run in as_completed(runs):
            new, seconds = run.result()
            write_rows(RESULT, merge(read_rows(RESULT) if RESULT.is_file() else [], new))
            inside, known, width = coverage(new)
            text = f"{runs[run]}: {len(new)} figures, median error {median_error(new):.2%}"
            text += f", {inside} of {known} inside their intervals (half-width {width:.0%})" if known else ""
            print(f"{text}, {seconds:.0f} s", flush=True)
    if runs:
        for tool in (("generate_tables.py",), ("doc_charts.py", "proof")):
            subprocess.run([sys.executable, str(ROOT / "tools" / tool[0]), *tool[1:]], check=True)
    return 0


def has_data(name: str, data: Path) -> bool:
    """Whether the data of a set is there; print what is absent."""
    path = data / SETS[name][0]
    if not path.exists():
        print(f"{name}: skipped, {path} is absent", file=sys.stderr)
    return path.exists()


def run_set(name: str, data: Path) -> tuple[list[Row], float]:
    """Return the rows of a set, and the seconds that they took."""
    start = time.perf_counter()
    return SETS[name][1](data), time.perf_counter() - start


def merge(old: list[Row], new: list[Row]) -> list[Row]:
    """Return the rows with those of some sets replaced, at their old place."""
    names = {row.set for row in new}
    place = next((k for k, row in enumerate(old) if row.set in names), len(old))
    return [*old[:place], *new, *(row for row in old[place:] if row.set not in names)]


if __name__ == "__main__":
    sys.exit(main())

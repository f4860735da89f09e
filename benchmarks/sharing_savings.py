"""KV blocks that sharing saves in parallel sampling and beam search, beside the figures of the PagedAttention paper.

    python benchmarks/sharing_savings.py [ALPACA.csv SHAREGPT.csv]

The files have prompt_tokens and output_tokens; the default is those of the shared data. Setting of the paper (Kwon et
al., SOSP 2023, section 6.3): OPT-13B on one A100 with 40 GB, blocks of 16 tokens, 2, 4 or 6 sequences, all of a request
with the length of the data set. Saving = 1 - different blocks / sum of the lengths of all block tables, over all steps.

For beam search two rules bracket the real one: `uniform` draws the parent of every beam from all live beams, so beams
soon have recent common ancestors; `never` forks only at the first token, as parallel sampling does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import Optional

from servesim.config.registry import preset
from servesim.config.scenario import scenario_from
from servesim.core import ClientRequest, Sampling
from servesim.runs.simulate import simulate
from servesim.traces.read.formats import load
from servesim.traces.trace import Trace, stream

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
FILES = (
    DATA / "contest" / "contest_alpaca5010_lengths.csv.gz",
    DATA / "traces" / "sharegpt10k_llama2_lengths.csv.gz",
)
RATES = {"Alpaca": 4.0, "ShareGPT": 0.4}  # requests per second: memory is used, but rarely full
REQUESTS, MAX_LENGTH = 400, 2048  # OPT has 2048 positions
PAPER = {  # percent, for 2 to 6 sequences
    ("Alpaca", "parallel"): "6.1 to 9.8", ("ShareGPT", "parallel"): "16.2 to 30.5",
    ("Alpaca", "beam"): "37.6 to 55.2", ("ShareGPT", "beam"): "44.3 to 66.3",
}  # fmt: skip
SEQUENCES = (2, 4, 6)
SCENARIO = {
    "policy": {**preset("vllm-0.6.1")["policy"], "max_num_batched_tokens": 2560},
    # 12 GB of KV cache at 0.82 MB per token; host blocks for all that is swapped
    "engine": {"num_blocks": 915, "block_size": 16, "host_blocks": 3000, "max_model_len": MAX_LENGTH},
    "profile": {"base": 0.02, "prefill_token": 0.00015, "decode_row": 0.0001, "context": 5e-7, "swap_block": 0.001},
    "trace": "lengths",
}


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """Return the prompt and output lengths of the requests that the model can run."""
    pairs = [(request.prompt, request.output) for request in load(path).requests]
    return [pair for pair in pairs if sum(pair) <= MAX_LENGTH][:REQUESTS]


def sampling_of(kind: str, sequences: int, output: int) -> Sampling:
    """Return the sequences of one request; `kind`: parallel, uniform or never."""
    if kind == "parallel":
        return Sampling(sequences)
    parents: Optional[list[list[int]]] = None
    if kind == "never":
        stay = list(range(sequences))
        parents = [[0] * sequences, *([stay] * (output - 2)), []][-output:]
    return Sampling(1, sequences, True, parents=parents)


def saving(name: str, lengths: list[tuple[int, int]], kind: str, sequences: int) -> float:
    """Return the percentage of blocks that sharing saves."""
    times = stream(0, "arrivals").exponential(1 / RATES[name], len(lengths)).cumsum().tolist()
    requests = [
        ClientRequest(number, time, prompt, output, sampling=sampling_of(kind, sequences, output))
        for number, (time, (prompt, output)) in enumerate(zip(times, lengths))
    ]
    run = simulate(scenario_from(SCENARIO), Trace(requests, name, "synth"))
    if run.stuck is not None:
        print(f"{name}, {kind}, {sequences} sequences: {run.stuck}", file=sys.stderr)
    return 100 * run.kv_metrics["kv_sharing"]


def main() -> int:
    """Print the table."""
    files = [Path(name) for name in sys.argv[1:]] or FILES
    print(f"{'lengths':<10} {'prompt':>7} {'output':>7}  {'method':<22} 2, 4, 6 sequences (%)   paper, 2 to 6 (%)")
    for name, path in zip(RATES, files):
        lengths = read_lengths(path)
        sizes = f"{mean(p for p, _ in lengths):7.1f} {mean(o for _, o in lengths):7.1f}"
        for kind, title in (
            ("parallel", "parallel sampling"),
            ("uniform", "beams, uniform"),
            ("never", "beams, never"),
        ):
            savings = [saving(name, lengths, kind, sequences) for sequences in SEQUENCES]
            paper = PAPER[name, "parallel" if kind == "parallel" else "beam"]
            print(f"{name:<10} {sizes}  {title:<22} {', '.join(f'{s:5.1f}' for s in savings)}      {paper:>14}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

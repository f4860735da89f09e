"""Token check on a GPU: answers of live runs against the same requests alone, in the dtype of the model.

    python benchmarks/gpu_tokens.py --out DIR [--model llama2-7b] [--requests 160] [--sample 24] [--seconds 110]

It needs torch, numpy and this repository, no installation. For every policy it prints how many answers differ, whether
they differ only at near ties, the first differences with their logit gaps, and the largest logit difference. Then a
broken allocator gives blocks to two requests, and the check must find it (exit code 1 if it does not). DIR holds
tokens.json with all results. The weights are random: their logits have no clear favourite, so near ties are far more
frequent than in a trained model. The output says how frequent.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Optional

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from h200_replay import find_package

BLOCK = 16
BLOCKS, FEW_BLOCKS, HOST_BLOCKS = 2500, 450, 450  # few: about a third of what the requests need together
POLICIES: dict[str, dict[str, Any]] = {
    "stock": {"name": "llm-serving", "decode_batch": 128},
    "prefill-8": {"name": "llm-serving", "decode_batch": 128, "prefill_batch": 8},
    "swapped-queue": {"name": "llm-serving", "decode_batch": 128, "preempted_to": "swapped"},
    "vllm-swap": {"name": "vllm", "max_num_seqs": 128, "preemption_mode": "swap", "watermark": 0.0},
    "vllm-chunked": {"name": "vllm-chunked", "max_num_seqs": 128, "max_num_batched_tokens": 256},
    "sarathi": {"name": "sarathi", "max_num_seqs": 128, "chunk_size": 256},
    # With its prefix cache and asynchronous scheduling. Some steps are longer than those with a graph.
    "vllm-v1": {"name": "vllm-v1", "max_num_seqs": 128, "max_num_batched_tokens": 1024},
}
SHARED_TOKENS = (0, 24, 40, 0)  # at the beginning of a prompt, if it is longer
MANY_BLOCKS = ("stock", "prefill-8")
SMALL_RUN = 24  # requests


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for tokens.json")
    parser.add_argument("--model", default="llama2-7b")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda if there is one)")
    parser.add_argument("--dtype", help="default: the dtype of the model on CUDA, float32 on the CPU")
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--sample", type=int, default=24, help="requests to check per policy (default 24)")
    parser.add_argument("--seconds", type=float, default=110.0, help="start no further policy after this (default 110)")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    return parser.parse_args()


def draw_requests(count: int, context: int) -> list[list[Any]]:
    """Return a burst of requests: mostly short prompts, some of several hundred tokens. Half of them share text."""
    draw = np.random.default_rng(11)
    prompts = np.clip(draw.lognormal(np.log(60), 1.1, count), 4, context // 3).astype(int)
    outputs = np.clip(draw.lognormal(np.log(45), 0.7, count), 4, 128).astype(int)
    requests = []
    for id, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist())):
        shared = SHARED_TOKENS[id % 4] if prompt > max(SHARED_TOKENS) else 0
        pieces = [[f"prefix:{id % 3}", shared], [f"prompt:{id}", prompt - shared]]
        content = {"pieces": pieces, "answer": None} if shared else None
        requests.append([id, 0.0, prompt, output, output, 0, None, content, None, 0.0, None])
    return requests


class Session:
    """A loaded model, and the runs on it."""

    def __init__(self, args: argparse.Namespace) -> None:
        from servesim.calibrate.device.backend import MODELS
        from servesim.calibrate.device.torch.backend import TorchBackend

        self.start = time.perf_counter()
        self.args, self.model = args, MODELS[args.model]
        self.backend = TorchBackend(args.device, dtype=args.dtype, threads=1)
        self.backend.load(self.model, BLOCKS + 1, BLOCK, HOST_BLOCKS)
        self.requests = draw_requests(args.requests, self.model.context)
        self.results: dict[str, Any] = {"about": self.backend.describe(), "runs": {}}

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def run(self, policy: str, sample: int, requests: Optional[int] = None) -> dict[str, Any]:
        """Run a policy live on the first requests, then a sample of them alone; return the result of the driver."""
        from servesim.calibrate.live.replay_job import replay

        few = policy not in MANY_BLOCKS
        engine = {"num_blocks": FEW_BLOCKS if few else BLOCKS, "block_size": BLOCK, "host_blocks": HOST_BLOCKS,
                  "max_model_len": self.model.context}  # fmt: skip
        args: dict[str, Any] = {
            "policy": POLICIES[policy], "engine": engine, "requests": self.requests[:requests], "seed": 0,
            "vocab": self.model.vocab, "context": self.model.context, "decisions": False,
        }  # fmt: skip
        if sample:
            args["check_tokens"] = sample
        return replay(self.backend, args)

    def report(self, name: str, result: dict[str, Any]) -> Any:
        """Print and keep the token check of a run."""
        from servesim.calibrate.replay.token_check import check_from_worker, format_check

        check = check_from_worker(result["token_check"])
        assert check is not None
        print(f"\n{name}: {len(result['calls'])} model calls in {result['end']:.2f} s, check {check.seconds:.1f} s")
        print("\n".join("  " + line for line in format_check(check, "0")), flush=True)
        self.results["runs"][name] = {"seconds": result["end"], **check.as_dict()}
        return check


def main() -> int:
    """Run all policies, then the broken allocator."""
    args = parse_arguments()
    find_package()
    from shared_block import broken_allocator

    session = Session(args)
    about = session.results["about"]
    print(f"{about['device']}, {args.model} with random weights in {about['dtype']}: loaded in {session.elapsed:.1f} s")
    session.run(args.policies[0], sample=0)  # warm-up
    plain, checked = session.run(args.policies[0], sample=0)["end"], session.run(args.policies[0], args.sample)
    print(f"{args.policies[0]}: {plain:.3f} s without the check, {checked['end']:.3f} s while it records answers")
    session.results["seconds_without_check"] = plain
    session.report(args.policies[0], checked)
    for policy in args.policies[1:]:
        if session.elapsed > args.seconds:
            print(f"\n{policy}: left out after {session.elapsed:.0f} s")
            continue
        session.report(policy, session.run(policy, args.sample))
    with broken_allocator(times=4):  # few requests are affected, so all of a small run are checked
        result = session.run(args.policies[0], SMALL_RUN, SMALL_RUN)
    broken = session.report("broken allocator: four blocks in two tables each", result)
    found = any(answer.beyond_ties for answer in broken.different)
    session.results["broken_allocator_found"] = found
    print(f"\nbroken allocator: {'found' if found else 'NOT FOUND'}; total {session.elapsed:.0f} s")
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokens.json").write_text(json.dumps(session.results, indent=1))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())

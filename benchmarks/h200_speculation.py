"""Measure speculative decoding on a GPU: throughput with and without drafts at three loads, beside the simulation.

Measure on the machine with the GPU (torch, numpy and this repository, no installation), in about five minutes:
    python benchmarks/h200_speculation.py --out DIR
Compare on any machine with servesim installed and a copy of DIR:
    python benchmarks/h200_speculation.py --compare DIR [--write TABLE.md] [--profile h200-llama3.1-8b]

A load is a number of clients that always wait for an answer. Each runs three times: without drafts, with drafts that
are verified but accepted at a fixed rate (as the synthetic acceptance of vLLM), and with the real n-gram drafter, whose
tokens are then compared with those of the requests alone. The simulation accepts what the device accepted.
DIR holds one archive: samples.csv (probe, before and after the runs), verified.json (steps with drafts, alone),
about.json, and one file per run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from array import array
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

BLOCK = 16  # tokens
DRAFTS = 3
RATE = 0.8  # of a draft, if those before it are accepted
CLIENTS = (8, 32, 128)
REQUESTS = {8: 80, 32: 288, 128: 960}  # about ten seconds each
PROMPT, OUTPUT = (64, 384), (100, 300)  # tokens, uniform
KINDS = ("off", "pretended", "ngram")
ROUNDS = 4  # of the probe, before the runs and after them: eight samples of a point, as `sim calibrate` takes
CHECKED = 12  # answers of a run with the n-gram drafter that run again alone
GRID_ROWS, GRID_DRAFTS, GRID_CONTEXT = (1, 4, 8, 16, 32, 64, 96, 128), (1, 3), (64, 256, 512, 1024)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", metavar="DIR", help="measure and write the archive to DIR")
    parser.add_argument("--compare", metavar="DIR", help="compare the runs in DIR with their simulation")
    parser.add_argument("--write", metavar="FILE", help="with --compare: write the table to FILE")
    parser.add_argument("--profile", metavar="NAME", help="with --compare: profile to use (default: this session's)")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda if there is one)")
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--blocks", type=int, default=16000)
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS))
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first N requests of each load")
    parser.add_argument("--repeats", type=int, default=9, help="of each step with drafts (default 9)")
    parser.add_argument("--probe", type=float, default=60.0, metavar="S", help="most seconds of a probe (default 60)")
    args = parser.parse_args()
    if bool(args.out) == bool(args.compare):
        parser.error("give either --out or --compare")
    return args


def draw_requests(clients: int, limit: Optional[int]) -> list[list[Any]]:
    """Return the requests of a load, all sent at the start, as client fields in order."""
    import numpy as np

    count = min(REQUESTS.get(clients, 8 * clients), limit or 1 << 30)
    draw = np.random.default_rng(clients)
    prompts, outputs = (draw.integers(low, high + 1, count).tolist() for low, high in (PROMPT, OUTPUT))
    return [
        [id, 0.0, prompt, output, output, 0, None, None, None, 0.0, None]
        for id, (prompt, output) in enumerate(zip(prompts, outputs))
    ]


class Session:
    """A loaded backend, and the archive of what was measured on it."""

    def __init__(self, args: argparse.Namespace) -> None:
        from replay_session import GRID, Recorder
        from replay_settings import MANY_ROWS
        from servesim.calibrate.device.torch.backend import ROW_BUCKETS, TorchBackend
        from servesim.calibrate.probe.measure import Probe
        from servesim.costs.model_arithmetic import MODELS
        from servesim.costs.public_models import PUBLIC_MODELS

        self.args, self.start = args, time.perf_counter()
        self.model = PUBLIC_MODELS.get(args.model) or MODELS[args.model]
        threads = 1 if args.device == "cpu" else None
        self.backend = TorchBackend(args.device, row_buckets=[*ROW_BUCKETS, *MANY_ROWS], threads=threads)
        self.backend.load(self.model, args.blocks + 1, BLOCK)
        self.recorder = Recorder(Path(args.out))
        about = {**self.backend.describe(), "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
        self.recorder.put("about.json", about)
        options = {**GRID, "max_rows": 128, "rounds": ROUNDS, "precision": 0.0, "budget": args.probe}
        self.probe = Probe(self.backend, options, lambda _: None)
        self.say(f"loaded {args.model}")

    def say(self, message: str) -> None:
        print(f"{time.perf_counter() - self.start:7.1f} s  {message}", flush=True)

    def measure_probe(self) -> None:
        """Add rounds of the probe to the samples."""
        import csv
        import io

        from servesim.calibrate.probe.measure import COLUMNS

        gc.collect()
        gc.disable()
        self.probe.started_at = time.perf_counter()  # the budget is that of these rounds
        self.probe.run()
        gc.enable()
        self.probe.flag()
        file = io.StringIO()
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.probe.rows)
        self.recorder.put("samples.csv", file.getvalue())
        self.recorder.write()
        self.say(f"{len(self.probe.rows)} probe samples")

    def measure_verified(self) -> None:
        """Measure steps of decodes with drafts, alone, as they are and with a prompt of 256 tokens."""
        from servesim.calibrate.device.backend import Row, shape_of_rows

        steps = []
        longest = self.model.context - 8
        for rows in GRID_ROWS:
            for context in (context for context in GRID_CONTEXT if context <= longest):
                for drafts in (0, *GRID_DRAFTS):
                    for prompt in (0, 256) if context == 256 else (0,):
                        per_row = -(-(context + 1 + DRAFTS) // BLOCK)
                        if (rows + 1) * max(per_row, 16) > self.args.blocks or prompt > longest:
                            continue
                        decodes = [
                            Row(array("i", [7] * (1 + drafts)), context, table(row, per_row), drafts)
                            for row in range(rows)
                        ]
                        prompts = [Row(array("i", [7] * prompt), 0, table(rows, 16))] if prompt else []
                        steps.append((shape_of_rows(prompts, decodes), [*prompts, *decodes]))
        found: list[list[float]] = [[] for _ in steps]
        for repeat in range(self.args.repeats + 1):  # the first round warms up
            for index, (_, batch) in enumerate(steps):
                begin = time.perf_counter()
                self.backend.step(batch)
                if repeat:
                    found[index].append(time.perf_counter() - begin)
        medians = [sorted(seconds)[len(seconds) // 2] for seconds in found]
        self.recorder.put("verified.json", [[*shape, median] for (shape, _), median in zip(steps, medians)])
        self.recorder.write()
        self.say(f"{len(steps)} steps with and without drafts")

    def run(self, kind: str, clients: int) -> None:
        """Run one load live and record it."""
        from servesim.calibrate.live.replay_job import replay

        policy = {
            "name": "vllm-v1", "max_num_seqs": clients, "max_num_batched_tokens": 2048, "async_scheduling": False,
            "enable_prefix_caching": False,
        }  # fmt: skip
        if kind != "off":
            policy.update(num_speculative_tokens=DRAFTS, speculative_method="ngram")
        args = {
            "policy": policy,
            "engine": {"num_blocks": self.args.blocks, "block_size": BLOCK, "max_model_len": self.model.context},
            "requests": draw_requests(clients, self.args.limit), "seed": 0, "vocab": self.model.vocab,
            "context": self.model.context, "warm_up": max(clients, 32),
            "check_tokens": CHECKED if kind == "ngram" else None,
        }  # fmt: skip
        with Pretended(kind == "pretended"):
            told = replay(self.backend, args)
        self.recorder.put(
            f"{kind}/{clients}.json.gz", {"setting": kind, "clients": clients, "args": args, "told": told}
        )
        self.recorder.write()
        tokens = sum(row[0] for row in told["requests"])
        drafts = {name: told["drafts"][name] for name in ("rows", "drafted", "accepted_at")} if kind != "off" else ""
        self.say(f"{clients} clients, {kind}: {tokens / told['end']:.0f} tokens/s, {told['end']:.1f} s {drafts}")


def table(row: int, blocks: int) -> array[int]:
    """Return the block table of a row that shares no block with others."""
    return array("i", range(1 + row * blocks, 1 + (row + 1) * blocks))


class Pretended:
    """While it is open, as many drafts count as accepted as drawn, whatever their tokens are."""

    def __init__(self, pretends: bool) -> None:
        import random

        self.pretends, rng = pretends, random.Random(1)
        self.lucks = [next((n for n in range(DRAFTS) if rng.random() >= RATE), DRAFTS) for _ in range(4099)]

    def accept(self, request: Any, drafts: int) -> int:
        return self.lucks[(request.serial * 7919 + request.written * 104729) % len(self.lucks)]

    def __enter__(self) -> None:
        from servesim.calibrate.live import driver

        self.made = made = driver.live_drafts

        def make(drafts: Any, steps_in_flight: int, backend: Any, method: str) -> Any:
            live = made(drafts, steps_in_flight, backend, method)
            if self.pretends:
                live.pretended = self.accept, None
            return live

        driver.live_drafts = make

    def __exit__(self, *_: object) -> None:
        from servesim.calibrate.live import driver

        driver.live_drafts = self.made


def measure(args: argparse.Namespace) -> int:
    """Measure everything; what there is can be compared after every run."""
    session = Session(args)
    session.measure_probe()
    session.measure_verified()
    for clients in args.clients:
        for kind in KINDS:
            session.run(kind, clients)
    session.measure_probe()
    return 0


def compare_all(args: argparse.Namespace) -> int:
    """Simulate every run, and print and write the table."""
    import gzip

    from replay_table import fit_profile, heading, read_archives, read_profile

    files = read_archives(Path(args.compare))
    profile = fit_profile(files, Path(args.compare)) if args.profile is None else read_profile(args.profile)
    lines = [*heading(json.loads(files["about.json"]), profile), *TABLE_HEAD]
    base: dict[int, tuple[float, float]] = {}
    recorded = [json.loads(gzip.decompress(files[name])) for name in files if name.endswith(".json.gz")]
    for run in sorted(recorded, key=lambda run: (run["clients"], KINDS.index(run["setting"]))):
        lines.append(compare_run(run, profile, base))
    lines += ["", *check_steps(json.loads(files["verified.json"]), profile)]
    lines += [describe_tokens(run) for run in recorded if run["told"]["token_check"]]
    print("\n".join(lines))
    if args.write:
        Path(args.write).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


COLUMNS = (
    "clients", "drafts", "accepted by position", "tokens per verified row", "measured tokens/s", "simulated", "error",
    "with measured step times", "gain measured", "gain simulated", "equal calls",
)  # fmt: skip
TABLE_HEAD = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]


def compare_run(recorded: dict[str, Any], profile: Any, base: dict[int, tuple[float, float]]) -> str:
    """Simulate one run; return its row. `base` has the throughput of each load without drafts."""
    from dataclasses import replace

    from replay_table import format_error
    from servesim.calibrate.replay.replay import ReplayedScenario, simulate_and_compare
    from servesim.costs.parts import HostPart
    from servesim.runs.run_folder import run_data

    live, requests = read_run(recorded, profile)
    replayed = ReplayedScenario("", live, replace(run_data(live, live.decisions), name=""))
    simulate_and_compare(replayed, requests, profile, HostPart(*recorded["told"]["host"]))
    comparison, clients = replayed.comparison, recorded["clients"]
    assert comparison is not None and comparison.calls_matched is not None
    tokens, makespan = sum(request.written for request in live.requests), comparison.row("makespan")
    rates = tokens / makespan.measured, tokens / makespan.simulated
    base.setdefault(clients, rates)
    drafts = recorded["told"].get("drafts")
    accepted = ("-", "-")
    if drafts:
        shares = ", ".join(f"{count / max(1, drafts['rows']):.2f}" for count in drafts["accepted_at"])
        accepted = (shares, f"{1 + drafts['accepted'] / max(1, drafts['rows']):.2f}")
    gains = [f"{rate / before:.3f}" for rate, before in zip(rates, base[clients])]
    rest = None if makespan.from_decisions is None else -makespan.from_decisions
    cells = [clients, recorded["setting"], *accepted, f"{rates[0]:.0f}", f"{rates[1]:.0f}"]
    cells += [
        format_error(rates[1] / rates[0] - 1),
        format_error(rest),
        *gains,
        "{} of {}".format(*comparison.calls_matched),
    ]
    return f"| {' | '.join(map(str, cells))} |"


def read_run(recorded: dict[str, Any], profile: Any) -> tuple[Any, list[Any]]:
    """Return a recorded run, and a copy of its requests before the run."""
    from servesim.calibrate.live.request_json import requests_from_json
    from servesim.calibrate.replay.measured_run import run_from_result
    from servesim.calibrate.replay.replay import as_backend_scenario
    from servesim.config.scenario import scenario_from

    args, policy = recorded["args"], dict(recorded["args"]["policy"])
    tokens, method = policy.pop("num_speculative_tokens", 0), policy.pop("speculative_method", "ngram")
    section = {"method": method, "tokens": tokens, "acceptance": 0.0}  # the simulation accepts what the device did
    scenario = scenario_from({"policy": policy, "engine": args["engine"], "speculative": section})
    finished, unserved = (requests_from_json(args["requests"]) for _ in range(2))
    return run_from_result(as_backend_scenario(scenario), profile, finished, recorded["told"]), unserved


def check_steps(rows: list[list[float]], profile: Any) -> list[str]:
    """Return a table: measured and predicted milliseconds of steps with drafts, alone."""
    from servesim.core import Shape

    lines = [
        "| rows | drafts per row | context | prompt | measured ms | predicted ms | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for *fields, seconds in rows:
        shape = Shape(*map(int, fields))
        predicted, live = profile.cost.duration(shape), shape.decode_live
        lines.append(
            f"| {live} | {shape.drafts // live} | {shape.context // live} | {shape.prefill_live} | {1e3 * seconds:.3f} "
            f"| {1e3 * predicted:.3f} | {100 * (predicted / seconds - 1):+.1f} % |"
        )
    return lines


def describe_tokens(recorded: dict[str, Any]) -> str:
    """Return how many answers of a run with verified drafts equal those of the requests alone."""
    check = recorded["told"]["token_check"]
    answers, different = check["answers"], [answer for answer in check["answers"] if answer["different"]]
    tokens = sum(answer["tokens"] for answer in answers)
    beyond = sum(answer["beyond_ties"] for answer in answers)
    return (
        f"{recorded['clients']} clients: {len(answers) - len(different)} of {len(answers)} answers equal those alone; "
        f"{sum(answer['different'] for answer in answers)} of {tokens} tokens differ, {beyond} not at a near tie"
    )


def main() -> int:
    """Measure or compare."""
    from h200_replay import find_package

    args = parse_arguments()
    find_package()
    return measure(args) if args.out else compare_all(args)


if __name__ == "__main__":
    sys.exit(main())

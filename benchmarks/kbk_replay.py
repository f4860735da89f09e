"""Policy settings live on MindSpore (kbk) with the tiny Llama on a CPU, and their simulation: the error, in a table.

    python benchmarks/kbk_replay.py [--worker-python .venv-kbk/bin/python] [--write benchmarks/results/kbk.md]
    python benchmarks/kbk_replay.py --threads 0 --profile cpu-tiny-kbk     the bundled profile instead of a probe

On a CPU whatever else the machine does is part of a step's time. So the model runs on one thread, the share of the
machine that others had is noted during every run (Linux), a setting is run again, at most so many times, until they had
next to nothing, and its calmest run stands in the table; how far its runs lie apart is told too. The profile is fitted
to the probe's steps and to those of a server on other requests, which come one kind after another. Requests arrive as
time goes by, more of them than the stock setting can serve.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from servesim.calibrate.device.worker_client import WorkerFailed
from servesim.calibrate.live.setup import Stage
from servesim.calibrate.probe.fit import profile_from
from servesim.calibrate.probe.measure import COLUMNS
from servesim.calibrate.probe.session import Sitting, sit
from servesim.calibrate.replay.replay import check_profile, replay_on
from servesim.calibrate.replay.verify import Comparison, ranks
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput, Request, Shape
from servesim.costs.device_profile import Profile, load_profile
from servesim.engine.step import ModelCall

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from replay_table import APART, METRICS, heading, shown, tau_apart  # noqa: E402

BEGUN = time.perf_counter()
BLOCKS, FEW, BLOCK = 1024, 26, 16  # blocks of the device, of a device short of memory, tokens of one
GRID = {"most_rows": 16, "most_tokens": 512, "longest": 512, "precision": 0.03, "seed": 0}
WARM_UP, REQUESTS = 8, 48
OTHER, CALIBRATED = 11, ("stock", "prefill-4", "chunked")  # seed of requests that are not judged; run to calibrate
CALM = 0.03  # of the machine, had by others: a run that need not be repeated
LOOK = 1.5  # seconds without others before a run is begun
LOAD = 3.0  # times what the stock setting can serve: nearer to saturation, a queue multiplies every error
STOCK: dict[str, Any] = {"name": "llm-serving", "decode_batch": 8, "prefill_batch": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "stock": STOCK,
    "prefill-4": {**STOCK, "prefill_batch": 4},
    "decode-4": {**STOCK, "decode_batch": 4},
    "decode-16": {**STOCK, "decode_batch": 16},
    "delay-0.5": {**STOCK, "delay_factor": 0.5, "delay_variant": "queue"},
    "sorted": {**STOCK, "order": "longest-output"},
    "chunked": {"name": "sarathi", "chunk_size": 48, "max_num_seqs": 8},
    "pressure": STOCK,
    "swapped-queue": {**STOCK, "evicted": "swapped"},
}
SHORT = ("pressure", "swapped-queue")  # settings with few blocks


def scenario_of(setting: str) -> Scenario:
    """Return a setting as a scenario."""
    blocks = FEW if setting in SHORT else BLOCKS
    return scenario_from({
        "policy": SETTINGS[setting],
        "engine": {"num_blocks": blocks, "block_size": BLOCK, "max_model_len": 512},
    })  # fmt: skip


def drawn(profile: Profile, seed: int = 7) -> list[Request]:
    """Return the requests: prompts and answers of tens of tokens, at LOAD times the pace of the stock setting."""
    draw, rows = np.random.default_rng(seed), int(STOCK["decode_batch"])
    prompts = np.clip(draw.lognormal(np.log(30), 0.6, REQUESTS), 8, 200).astype(int)
    outputs = np.clip(draw.lognormal(np.log(25), 0.6, REQUESTS), 2, 120).astype(int)
    decode = profile.cost.decode(rows, rows, rows * int(prompts.mean() + outputs.mean() / 2)) / rows
    work = prefill_seconds(profile, int(prompts.mean())) + outputs.mean() * decode
    arrivals = np.cumsum(draw.exponential(work / LOAD, REQUESTS))
    rows_of = zip(arrivals - arrivals[0], prompts, outputs)
    return [Request(id, float(arrival), int(p), int(o)) for id, (arrival, p, o) in enumerate(rows_of)]


def prefill_seconds(profile: Profile, tokens: int) -> float:
    """Return what one prompt takes."""
    return profile.cost.seconds(Shape(1, tokens, tokens, tokens * tokens, 0, 0, 0, 0, 0))


def probed(stage: Stage, seconds: float, folder: Path) -> Profile:
    """Measure the device that the stage has loaded, designed steps first and then a server's, and fit."""
    settings = {**GRID, "budget": seconds, "backend": "kbk", "model": stage.model.name, "blocks": BLOCKS,
                "block_size": BLOCK, "host_blocks": 0}  # fmt: skip
    sitting = Sitting(folder, settings)
    result = sit(stage.worker, sitting, lambda report: None)
    say(f"{result['known']} of {result['points']} points known in {result['seconds']:.0f} s")
    designed = profile_from(sitting.samples, stage.about, "of this sitting")
    for setting in CALIBRATED:
        live = replay_on(stage, setting, scenario_of(setting), drawn(designed, OTHER), None, WARM_UP).live
        keep(live.model_calls, sitting.samples)
    say(f"and of {', '.join(CALIBRATED)} on other requests")
    return profile_from(sitting.samples, stage.about, "of this sitting")


def keep(calls: Sequence[ModelCall], path: Path) -> None:
    """Write a server's calls behind the designed samples, each a point of its own: rows as unlike as they come."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    first = max(int(row["point"]) for row in rows) + 1
    for number, call in enumerate(calls):
        shape = call.shape
        rows.append({"kind": shape.kind, **shape._asdict(), "seconds": call.end - call.called, "point": first + number})
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


class Others:
    """The share of the machine that other processes, and other machines on the same host, have from now on."""

    def __init__(self) -> None:
        self._begun, self._seconds = time.perf_counter(), others()

    def share(self) -> float:
        """Return it, 0 where nobody keeps count."""
        wall = (time.perf_counter() - self._begun) * (os.cpu_count() or 1)
        return max(0.0, others() - self._seconds) / wall


def others() -> float:
    """Return the processor seconds of all but this process and its children since the machine started."""
    if not Path("/proc/stat").is_file():
        return 0.0
    user, nice, system, _, _, irq, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    ticks = user + nice + system + irq + soft + steal
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            pid, fields = stat.parent.name, stat.read_text().rpartition(")")[2].split()
            if str(os.getpid()) in (pid, fields[1]):
                ticks -= int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class Took(NamedTuple):
    """A run compared with its simulation, and how calm the machine was."""

    comparison: Comparison
    others: float  # share of the machine

    @property
    def seconds(self) -> float:
        """The measured makespan."""
        return self.comparison.line("makespan").measured or 0.0


def measure(args: argparse.Namespace, stage: Stage, folder: Path) -> tuple[Profile, list[list[Took]]]:
    """Calibrate, then replay every setting until a run was calm; return the runs, by setting."""
    stage.load([scenario_of(setting) for setting in SETTINGS])
    say(f"loaded {stage.model.name} on {stage.about['device']}")
    profile = load_profile(args.profile) if args.profile else probed(stage, args.probe_seconds, folder)
    check_profile(profile, stage)
    found: dict[str, list[Took]] = {setting: [] for setting in args.settings}
    until = time.perf_counter() + args.patience
    for _ in range(args.repeats):
        for setting in args.settings:
            if min((took.others for took in found[setting]), default=1.0) > CALM:
                wait_for_calm(until)
                found[setting].append(replayed(stage, setting, profile))
    return profile, list(found.values())


def wait_for_calm(until: float) -> None:
    """Return when nobody else is at work, or no later than told."""
    while time.perf_counter() < until:
        meanwhile = Others()
        time.sleep(LOOK)
        if meanwhile.share() <= CALM:
            return


def replayed(stage: Stage, setting: str, profile: Profile) -> Took:
    """Replay a setting once and compare it with its simulation."""
    meanwhile = Others()
    comparison = replay_on(stage, setting, scenario_of(setting), drawn(profile), profile, WARM_UP).comparison
    assert comparison is not None
    took = Took(comparison, meanwhile.share())
    error = shown(comparison.line("makespan").error)
    say(f"{setting}: {took.seconds:.2f} s, {error}; others had {100 * took.others:.1f} % of the machine")
    return took


def stage_of(args: argparse.Namespace) -> Stage:
    """Return where the runs take place."""
    return Stage("kbk", "tiny", args.worker_python, options={"threads": args.threads} if args.threads else None)


def say(what: str) -> None:
    """Tell how the sitting goes on."""
    print(f"{time.perf_counter() - BEGUN:7.1f} s  {what}", file=sys.stderr, flush=True)


def table(found: list[list[Took]]) -> list[str]:
    """Return what was measured, the errors, where they come from, and whether ranks hold."""
    head = ("setting", "makespan (s)", "others had", "runs apart", *METRICS.values(), "from step times (makespan)",
            "decisions")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    calmest = [min(runs, key=lambda took: took.others) for runs in found]
    usual = [took.comparison for took in calmest]
    for took, one, runs in zip(calmest, usual, found):
        apart = (max(run.seconds for run in runs) - min(run.seconds for run in runs)) / took.seconds
        told = f"{100 * apart:.1f} % ({len(runs)})" if len(runs) > 1 else ""
        errors = [shown(one.line(metric).error) for metric in METRICS]
        cells = [one.name, f"{took.seconds:.2f}", f"{100 * took.others:.1f} %", told, *errors]
        lines.append(f"| {' | '.join([*cells, shown(one.line('makespan').steps), decided(one)])} |")
    sizes = [[abs(one.line(metric).error or 0.0) for one in usual] for metric in METRICS]
    alike = sum(one.decisions is not None and one.decisions.identical for one in usual)
    lines.append(in_bold("median", [f"{100 * median(size):.2f} %" for size in sizes], f"{alike} of {len(usual)} alike"))
    lines.append(in_bold("worst", [f"{100 * max(size):.2f} %" for size in sizes]))
    taus = {metric: tau_apart(usual, metric) for metric in METRICS}
    for label, tau in (("Kendall's tau", ranks(usual, list(METRICS))), (f"tau of settings {APART:.0%} apart", taus)):
        lines.append(in_bold(label, ["-" if tau[m] is None else f"{tau[m]:.2f}" for m in METRICS]))
    return lines


def in_bold(label: str, cells: list[str], decisions: str = "") -> str:
    """Return a row that sums up."""
    return f"| **{label}** | | | | {' | '.join(cells)} | | {decisions} |"


def decided(one: Comparison) -> str:
    """Say how far both sides decided alike."""
    alike = one.decisions
    assert alike is not None
    return f"all {alike.same} alike" if alike.identical else f"{alike.same} of {alike.measured}, then one differs"


def main() -> int:
    """Measure, compare, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worker-python", metavar="PATH", default=str(ROOT / ".venv-kbk" / "bin" / "python"))
    parser.add_argument("--profile", metavar="NAME", help="a profile of this device instead of a probe in this sitting")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of MindSpore (1); 0: one a core")
    parser.add_argument("--probe-seconds", type=float, default=120.0, metavar="S")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of a setting at most (3)")
    parser.add_argument(
        "--patience", type=float, default=0.0, metavar="S", help="wait so long in all for others to rest"
    )
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--write", metavar="FILE", help="write the table there")
    args = parser.parse_args()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    try:
        with tempfile.TemporaryDirectory() as folder, stage_of(args) as stage:
            profile, found = measure(args, stage, Path(folder))
            lines = [*heading({**stage.about, "date": date}, profile), *table(found)]
            lines[0] += f", {args.threads or os.cpu_count()} of {os.cpu_count()} threads"
    except (BadInput, WorkerFailed) as failed:
        print(f"kbk_replay: {failed}", file=sys.stderr)
        return 2 if isinstance(failed, BadInput) else 1
    print("\n".join(lines))
    if args.write:
        Path(args.write).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

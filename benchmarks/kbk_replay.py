"""Run policy settings live on MindSpore (kbk) with the tiny Llama on a CPU, simulate them, write a table of the errors.

    python benchmarks/kbk_replay.py [--worker-python .venv-kbk/bin/python] [--write benchmarks/results/kbk.md]
    python benchmarks/kbk_replay.py --threads 0 --profile cpu-tiny-kbk     the bundled profile instead of a probe

On a CPU, other processes slow down the steps. So the model uses one thread, and every run records the fraction of CPU
time that other processes used (Linux). A setting is repeated, at most --repeats times, until this fraction is small.
The table shows the run with the smallest fraction, and how far the runs of a setting differ. The profile is fitted to
the probe samples and to steps of a server on other requests. The offered load is LOAD times the stock capacity.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from servesim.calibrate.device.worker_client import WorkerFailed
from servesim.calibrate.live.setup import DeviceSession
from servesim.calibrate.probe.fitted_profile import fit_profile
from servesim.calibrate.probe.measure import as_rows
from servesim.calibrate.probe.samples import read_samples
from servesim.calibrate.probe.session import ProbeSession, run_session
from servesim.calibrate.replay.replay import check_profile, replay_on_backend
from servesim.calibrate.replay.verify import Comparison
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput, Request, Shape
from servesim.costs.device_profile import Profile, load_profile
from servesim.files.step_table import ModelCall, append_steps

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from replay_table import METRICS, format_error, heading, summary_cells  # noqa: E402

START = time.perf_counter()
BLOCKS, FEW_BLOCKS, BLOCK = 1024, 26, 16  # KV blocks; KV blocks of FEW_BLOCKS_SETTINGS; tokens per block
GRID = {"max_rows": 16, "max_tokens": 512, "max_seq_len": 512, "precision": 0.03, "seed": 0}
WARM_UP, REQUESTS = 8, 48
CALIBRATION_SEED, CALIBRATION_SETTINGS = 11, ("stock", "prefill-4", "chunked")  # served for the fit, not compared
MAX_OTHER_CPU = 0.03  # fraction of CPU time of other processes; a run below it is not repeated
IDLE_CHECK_S = 1.5  # a run starts after this many seconds without other processes
LOAD = 3.0  # multiple of the stock capacity; near 1 a queue multiplies every error
STOCK: dict[str, Any] = {"name": "llm-serving", "decode_batch": 8, "prefill_batch": 1}
PROFILE_NAME = "measured in this session"
SETTINGS: dict[str, dict[str, Any]] = {
    "stock": STOCK,
    "prefill-4": {**STOCK, "prefill_batch": 4},
    "decode-4": {**STOCK, "decode_batch": 4},
    "decode-16": {**STOCK, "decode_batch": 16},
    "delay-0.5": {**STOCK, "delay_factor": 0.5, "delay_variant": "queue"},
    "sorted": {**STOCK, "order": "longest-output"},
    "chunked": {"name": "sarathi", "chunk_size": 48, "max_num_seqs": 8},
    "pressure": STOCK,
    "swapped-queue": {**STOCK, "preempted_to": "swapped"},
}
FEW_BLOCKS_SETTINGS = ("pressure", "swapped-queue")


def scenario_of(setting: str) -> Scenario:
    """Return a setting as a scenario."""
    blocks = FEW_BLOCKS if setting in FEW_BLOCKS_SETTINGS else BLOCKS
    return scenario_from({
        "policy": SETTINGS[setting],
        "engine": {"num_blocks": blocks, "block_size": BLOCK, "max_model_len": 512},
    })  # fmt: skip


def draw_requests(profile: Profile, seed: int = 7) -> list[Request]:
    """Return requests with tens of prompt and output tokens, at LOAD times the capacity of the stock setting."""
    draw, rows = np.random.default_rng(seed), int(STOCK["decode_batch"])
    prompts = np.clip(draw.lognormal(np.log(30), 0.6, REQUESTS), 8, 200).astype(int)
    outputs = np.clip(draw.lognormal(np.log(25), 0.6, REQUESTS), 2, 120).astype(int)
    decode = profile.cost.decode(rows, rows, rows * int(prompts.mean() + outputs.mean() / 2)) / rows
    work = prefill_seconds(profile, int(prompts.mean())) + outputs.mean() * decode
    arrivals = np.cumsum(draw.exponential(work / LOAD, REQUESTS))
    rows_of = zip(arrivals - arrivals[0], prompts, outputs)
    return [Request(id, float(arrival), int(p), int(o)) for id, (arrival, p, o) in enumerate(rows_of)]


def prefill_seconds(profile: Profile, tokens: int) -> float:
    """Return the seconds of a prefill of one prompt."""
    return profile.cost.seconds(Shape(1, tokens, tokens, tokens * tokens, 0, 0, 0, 0, 0))


def measure_profile(session: DeviceSession, seconds: float, folder: Path) -> Profile:
    """Probe the loaded device, add the steps of served requests, and fit."""
    settings = {**GRID, "budget": seconds, "backend": "kbk", "model": session.model.name, "num_blocks": BLOCKS,
                "block_size": BLOCK, "host_blocks": 0}  # fmt: skip
    probe = ProbeSession(folder, settings)
    result = run_session(session.worker, probe, True)
    print_progress(f"{result['known']} of {result['points']} points precise in {result['seconds']:.0f} s")
    probe_only = fit_profile(probe.samples, session.about, PROFILE_NAME)
    for setting in CALIBRATION_SETTINGS:
        requests = draw_requests(probe_only, CALIBRATION_SEED)
        live = replay_on_backend(session, setting, scenario_of(setting), requests, None, WARM_UP).live
        append_calls(live.model_calls, probe.samples)
    print_progress(f"added the steps of {', '.join(CALIBRATION_SETTINGS)} on other requests")
    return fit_profile(probe.samples, session.about, PROFILE_NAME)


def append_calls(calls: Sequence[ModelCall], path: Path) -> None:
    """Append the model calls of a server to samples.csv, one point per call."""
    first = max(step.point or 0 for step in read_samples(path)) + 1
    rows = [
        {"kind": call.shape.kind, **call.shape._asdict(), "seconds": call.end - call.called, "point": first + number}
        for number, call in enumerate(calls)
    ]
    append_steps(path, as_rows(rows))


class OtherProcesses:
    """CPU time used by other processes, and by other virtual machines on the host, since this object was created."""

    def __init__(self) -> None:
        self._start, self._seconds = time.perf_counter(), other_cpu_seconds()

    def cpu_fraction(self) -> float:
        """Return their fraction of all CPU time; 0 if the system does not report it."""
        wall = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        return max(0.0, other_cpu_seconds() - self._seconds) / wall


def other_cpu_seconds() -> float:
    """Return the CPU seconds since boot of all processes except this one and its children."""
    if not Path("/proc/stat").is_file():
        return 0.0
    user, nice, system, _, _, irq, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    ticks = user + nice + system + irq + soft + steal
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            pid, fields = stat.parent.name, stat.read_text().rpartition(")")[2].split()
            if str(os.getpid()) in (pid, fields[1]):
                ticks -= int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class RunResult(NamedTuple):
    """A live run compared with its simulation."""

    comparison: Comparison
    other_cpu: float  # fraction of CPU time of other processes

    @property
    def seconds(self) -> float:
        """The measured makespan in seconds."""
        return self.comparison.row("makespan").measured or 0.0


def measure(args: argparse.Namespace, session: DeviceSession, folder: Path) -> tuple[Profile, list[list[RunResult]]]:
    """Calibrate, then replay every setting until a run is undisturbed; return the runs of each setting."""
    session.load([scenario_of(setting) for setting in SETTINGS])
    print_progress(f"loaded {session.model.name} on {session.about['device']}")
    profile = load_profile(args.profile) if args.profile else measure_profile(session, args.probe_seconds, folder)
    check_profile(profile, session)
    results: dict[str, list[RunResult]] = {setting: [] for setting in args.settings}
    deadline = time.perf_counter() + args.patience
    for _ in range(args.repeats):
        for setting in args.settings:
            if min((run.other_cpu for run in results[setting]), default=1.0) > MAX_OTHER_CPU:
                wait_until_idle(deadline)
                results[setting].append(replay_once(session, setting, profile))
    return profile, list(results.values())


def wait_until_idle(deadline: float) -> None:
    """Return when other processes use at most MAX_OTHER_CPU, or at the deadline."""
    while time.perf_counter() < deadline:
        others = OtherProcesses()
        time.sleep(IDLE_CHECK_S)
        if others.cpu_fraction() <= MAX_OTHER_CPU:
            return


def replay_once(session: DeviceSession, setting: str, profile: Profile) -> RunResult:
    """Replay a setting once and compare it with its simulation."""
    others = OtherProcesses()
    comparison = replay_on_backend(
        session, setting, scenario_of(setting), draw_requests(profile), profile, WARM_UP
    ).comparison
    assert comparison is not None
    run = RunResult(comparison, others.cpu_fraction())
    error = format_error(comparison.row("makespan").error)
    print_progress(f"{setting}: {run.seconds:.2f} s, {error}; other processes: {100 * run.other_cpu:.1f} % of CPU time")
    return run


def device_session(args: argparse.Namespace) -> DeviceSession:
    """Return the MindSpore worker with the tiny model."""
    return DeviceSession("kbk", "tiny", args.worker_python, options={"threads": args.threads} if args.threads else None)


def print_progress(message: str) -> None:
    """Print a message with the seconds since the start."""
    print(f"{time.perf_counter() - START:7.1f} s  {message}", file=sys.stderr, flush=True)


def table(results: list[list[RunResult]]) -> list[str]:
    """Return the number of runs with identical decisions, then the table: least disturbed runs, summary rows."""
    head = ("setting", "makespan (s)", "other CPU use", "spread of runs", *METRICS.values(),
            "from step times (makespan)", "identical decisions")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    best_runs = [min(runs, key=lambda run: run.other_cpu) for runs in results]
    comparisons = [run.comparison for run in best_runs]
    for run, comparison, runs in zip(best_runs, comparisons, results):
        times = [repeat.seconds for repeat in runs]
        spread = f"{100 * (max(times) - min(times)) / run.seconds:.1f} % ({len(runs)})" if len(runs) > 1 else ""
        errors = [format_error(comparison.row(metric).error) for metric in METRICS]
        cells = [comparison.name, f"{run.seconds:.2f}", f"{100 * run.other_cpu:.1f} %", spread, *errors]
        cells += [format_error(comparison.row("makespan").from_step_times), count_identical(comparison)]
        lines.append(f"| {' | '.join(cells)} |")
    for label, cells in summary_cells(comparisons).items():
        lines.append(f"| **{label}** | | | | {' | '.join(cells)} | | |")
    identical = sum(one.decisions is not None and one.decisions.identical for one in comparisons)
    return [f"all decisions identical, simulated and measured: in {identical} of {len(comparisons)} runs", "", *lines]


def count_identical(comparison: Comparison) -> str:
    """Return how many steps have the same decision in both runs before the first difference."""
    decisions = comparison.decisions
    assert decisions is not None
    return f"all {decisions.same}" if decisions.identical else f"first {decisions.same} of {decisions.measured}"


def main() -> int:
    """Measure, compare, and print or write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worker-python", metavar="PATH", default=str(ROOT / ".venv-kbk" / "bin" / "python"))
    parser.add_argument("--profile", metavar="NAME", help="profile of this device (default: probe it now)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads (default 1; 0: one per core)")
    parser.add_argument("--probe-seconds", type=float, default=120.0, metavar="S")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="maximum runs per setting (default 3)")
    parser.add_argument(
        "--patience", type=float, default=0.0, metavar="S", help="total seconds to wait for an idle machine"
    )
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--write", metavar="FILE", help="write the table to FILE")
    args = parser.parse_args()
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    try:
        with tempfile.TemporaryDirectory() as folder, device_session(args) as session:
            profile, results = measure(args, session, Path(folder))
            lines = [*heading({**session.about, "date": date}, profile)[:-1], *table(results)]
            lines[0] += f", {args.threads or os.cpu_count()} of {os.cpu_count()} CPU threads used"
    except (BadInput, WorkerFailed) as failed:
        print(f"kbk_replay: {failed}", file=sys.stderr)
        return 2 if isinstance(failed, BadInput) else 1
    print("\n".join(lines))
    if args.write:
        Path(args.write).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

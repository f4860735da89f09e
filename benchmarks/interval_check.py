"""Whether measured values are inside the intervals of their simulations, and how wide the intervals are.

    python benchmarks/interval_check.py FOLDER... [--profile NAME] [--draws N]
    python benchmarks/interval_check.py --engines N

FOLDER holds replays of `sim replay -o` (folders with sim/ and live/, at any depth) or archives of h200_replay.py. Runs
are grouped by their folder or workload, for example one per load. A simulation without intervals is repeated with
random cost models of its profile, or of --profile. The exit code is 3 if less than 90 % of the values are inside.
With --engines, the measured side is a synthetic engine (synthetic_engines.py), in the session of its samples or in
another one, where all its steps are slower or faster by a random factor.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

from replay_table import compare_run, fit_profile, is_compared_run, read_archives, session_host
from servesim.calibrate.probe.fit_errors import held_out_errors, measured_range
from servesim.calibrate.probe.host_overhead import measured_host
from servesim.calibrate.replay.replay import as_backend_scenario
from servesim.calibrate.replay.resimulate import replay_intervals
from servesim.calibrate.replay.verify import Comparison, MetricRow, compare, pair_folders
from servesim.core import BadInput
from servesim.core.limits import DEFAULT_DRAWS
from servesim.costs.derived import ScaledCost
from servesim.costs.device_profile import Profile, load_profile
from servesim.costs.uncertainty import SESSION_SPREAD
from servesim.runs.intervals import intervals_of, simulate_draws
from servesim.runs.run_folder import RunData, read_run
from servesim.runs.simulate import load_trace, simulate
from servesim.traces.trace import Trace
from synthetic_engines import ROW_BUCKETS, TOKEN_BUCKETS, fit_engine

METRICS = ("makespan", "mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
ENOUGH = 0.9  # fraction of measured values inside


class Checked(NamedTuple):
    """One run."""

    group: str
    comparison: Comparison

    def rows(self) -> list[MetricRow]:
        """Return the metrics that are measured and have an interval."""
        return [row for row in map(self.comparison.row, METRICS) if row.inside is not None]


def half_width(row: MetricRow) -> float:
    """Return half the width of an interval, relative to the simulated value."""
    assert row.interval is not None
    return (row.interval[1] - row.interval[0]) / 2 / row.simulated if row.simulated else 0.0


def read_replays(folder: Path, profile: Optional[str], draws: int) -> Iterator[Checked]:
    """Yield the replays in a folder and its subfolders."""
    for live in sorted(path for path in folder.rglob("live") if (path.parent / "sim").is_dir()):
        pairs, _ = pair_folders(live.parent / "sim", live)
        for name, simulated, measured in pairs:
            ours, theirs = read_run(simulated), read_run(measured)
            if "intervals" not in ours.result or profile is not None:
                ours = with_intervals(ours, theirs, profile, draws)
            yield Checked(live.parent.name, compare(ours, replace(theirs, name=name or theirs.name)))


def with_intervals(simulated: RunData, measured: RunData, profile: Optional[str], draws: int) -> RunData:
    """Return the simulation of a replay with intervals; the measured side has the requests and the host overhead."""
    assert simulated.scenario is not None
    if measured.sent is None:
        raise BadInput(f"{measured.name}: expected sent.jsonl with the requests of the replay, got none")
    loaded = load_profile(profile or simulated.scenario.profile)
    host = measured_host(measured.result)
    scenario = as_backend_scenario(simulated.scenario)
    requests = list(measured.sent)
    run = simulate(scenario, Trace(requests, "replay", "synth"), profile=loaded)
    sampling = scenario.engine.sampling
    intervals = replay_intervals(
        replace(run, intervals=None), requests, loaded, lambda drawn: drawn.for_run(sampling, host), draws
    )
    return replace(simulated, result={**simulated.result, "intervals": intervals})


def read_sessions(folder: Path, profile: Optional[str], draws: int) -> Iterator[Checked]:
    """Yield the runs of the archives that h200_replay.py wrote."""
    files = read_archives(folder)
    recorded = [json.loads(gzip.decompress(data)) for name, data in files.items() if is_compared_run(name)]
    if not recorded:
        return
    loaded = fit_profile(files, folder) if profile is None else load_profile(profile)
    host = session_host(files, recorded)
    for run in recorded:
        yield Checked(run["workload"], compare_run(run, loaded, host, draws, same_session=profile is None))


def check_engine(seed: int, draws: int = DEFAULT_DRAWS) -> tuple[list[bool], list[bool]]:
    """Return which metrics of a synthetic engine are inside: in the session of its samples, and in another one."""
    case = fit_engine(seed)
    about = {"row_buckets": ROW_BUCKETS, "token_buckets": TOKEN_BUCKETS} if case.engine.padded else {}
    errors = held_out_errors(case.fitted.kept, about).by_range()
    found = {"uncertainty": {"draws": case.fitted.draws}, "error_by_range": errors}
    profile = Profile("fitted", case.fitted.cost, found | {"grid": measured_range(case.fitted.kept)})
    trace = load_trace(case.scenario)
    predicted = simulate(case.scenario, trace, profile=profile)
    limits = intervals_of(predicted, simulate_draws(case.scenario, profile, draws, trace), profile)["metrics"]
    sessions = []
    for factor in (1.0, math.exp(case.rng.gauss(0.0, SESSION_SPREAD))):
        true = simulate(case.scenario, trace, profile=Profile("true", ScaledCost(case.engine, factor))).result()
        sessions.append(
            [metric in limits and limits[metric][0] <= true[metric] <= limits[metric][1] for metric in METRICS]
        )
    return sessions[0], sessions[1]


def check_engines(count: int, draws: int) -> int:
    """Print how many metrics of synthetic engines are inside their intervals."""
    same, other = zip(*(check_engine(seed, draws) for seed in range(count)))
    parts = []
    for name, flags in (("the session of their samples", same), ("another session", other)):
        counts = [sum(engine[k] for engine in flags) for k in range(len(METRICS))]
        parts.append(sum(counts) / (count * len(METRICS)))
        cells = ", ".join(f"{metric} {inside}" for metric, inside in zip(METRICS, counts))
        print(f"{count} engines in {name}: {cells} inside ({parts[-1]:.1%})")
    return 0 if min(parts) >= ENOUGH else 3


def report(runs: Sequence[Checked]) -> float:
    """Print every run, then coverage and widths; return the fraction of values inside."""
    print(f"{'group':<16}{'run':<24}" + "".join(f"{metric:>26}" for metric in METRICS))
    for run in runs:
        print(f"{run.group:<16}{run.comparison.name:<24}" + "".join(map(format_cell, map(run.comparison.row, METRICS))))
    for group in dict.fromkeys(run.group for run in runs):
        show_coverage(group, [row for run in runs if run.group == group for row in run.rows()])
    return show_coverage("all", [row for run in runs for row in run.rows()])


def format_cell(row: MetricRow) -> str:
    """Return the error of the simulation and the half-width of its interval."""
    if row.inside is None or row.error is None:
        return f"{'-':>26}"
    text = f"{row.error:+.1%} +-{half_width(row):.1%}{'' if row.inside else ' outside'}"
    return f"{text:>26}"


def show_coverage(name: str, rows: Sequence[MetricRow]) -> float:
    """Print coverage and half-widths by metric; return the fraction inside."""
    inside = sum(bool(row.inside) for row in rows)
    widths = []
    for metric in METRICS:
        values = [half_width(row) for row in rows if row.metric == metric]
        if values:
            widths.append(f"{metric} +-{statistics.median(values):.1%} (max {max(values):.1%})")
    part = inside / len(rows) if rows else 0.0
    print(f"{name}: {inside} of {len(rows)} measured values inside ({part:.0%}); half-widths: {', '.join(widths)}")
    return part


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Check all folders."""
    parser: Any = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--engines", type=int, metavar="N", help="check N synthetic engines instead of folders")
    parser.add_argument("--profile", help="profile of the simulations (default: their own)")
    parser.add_argument("--draws", type=int, default=DEFAULT_DRAWS, help="random cost models per run")
    args = parser.parse_args(arguments)
    if args.engines:
        return check_engines(args.engines, args.draws)
    runs: list[Checked] = []
    for folder in args.folders:
        runs += [*read_replays(folder, args.profile, args.draws), *read_sessions(folder, args.profile, args.draws)]
    if not runs:
        print("no replay found: expected folders with sim/ and live/, or archives of h200_replay.py", file=sys.stderr)
        return 2
    return 0 if report(runs) >= ENOUGH else 3


if __name__ == "__main__":
    sys.exit(main())

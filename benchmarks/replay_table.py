"""The table of h200_replay.py: simulates every recorded run from the profile of its session and lists the errors."""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replay_settings import WORKLOADS

TYPICAL_ROWS = 32  # rows of a typical step


def compare_all(args: argparse.Namespace) -> int:
    """Fit the profile, simulate every run, and print and write the errors."""
    files = read_archives(Path(args.compare))
    about = json.loads(files["about.json"])
    recorded = [json.loads(gzip.decompress(data)) for name, data in files.items() if is_compared_run(name)]
    profile = fit_profile(files, Path(args.compare)) if args.profile is None else read_profile(args.profile)
    host = session_host(files, recorded)
    comparisons: dict[str, list[Any]] = {}
    notes = []
    for run in sorted(recorded, key=lambda run: workload_index(run["workload"])):
        own_host = host_of(run, host)
        comparison = compare_run(run, profile, own_host)
        comparisons.setdefault(run["workload"], []).append(comparison)
        notes += [describe_steps(run, profile, own_host), describe_decisions(run, comparison)]
    repeats = [json.loads(gzip.decompress(data)) for name, data in files.items() if name.startswith("again/")]
    repeated = {run["workload"]: read_recorded_run(run, profile)[0].result() for run in repeats}
    lines = [*heading(about, profile), *table(comparisons, repeated)]
    print("\n".join(lines))
    print("\nstep seconds on the device, measured / profile, by kind of step; host overhead, measured and assumed")
    print("\n".join(notes))
    if args.write:
        Path(args.write).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def is_compared_run(name: str) -> bool:
    """Return whether a file is a run of the table, not a repeat."""
    return name.endswith(".json.gz") and not name.startswith("again/")


def workload_index(workload: str) -> int:
    """Return the position of a workload in the table."""
    return list(WORKLOADS).index(workload) if workload in WORKLOADS else len(WORKLOADS)


def read_profile(profile: str) -> Any:
    """Return a profile by its name or folder."""
    from servesim.costs.device_profile import load_profile

    return load_profile(profile)


def read_archives(folder: Path) -> dict[str, bytes]:
    """Return the files of all archives in a folder. Later archives replace files of earlier ones."""
    files: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*.tar.gz")):
        with tarfile.open(path) as archive:
            for entry in archive:
                data = archive.extractfile(entry)
                if data is not None:
                    files[entry.name] = data.read()
    return files


def fit_profile(files: dict[str, bytes], folder: Path) -> Any:
    """Fit a profile to the samples of the session."""
    from servesim.calibrate.probe.fitted_profile import fit_profile as fit_samples

    samples = folder / "samples.csv"
    samples.write_bytes(files["samples.csv"])
    return fit_samples(samples, json.loads(files["about.json"]))


def session_host(files: dict[str, bytes], recorded: list[dict[str, Any]]) -> Any:
    """Return the host overhead per step, fitted to the calibration runs of the session."""
    from statistics import median

    from servesim.calibrate.probe.host_overhead import fit_overhead
    from servesim.costs.parts import HostPart

    results = [run["told"] for run in recorded]
    samples = json.loads(files.get("hosts.json", b"[]"))
    if not samples:  # no served calibration steps: use the warm-up steps, which have no arrivals or finishes
        samples = [sample for run in results for sample in run.get("host_parts", ())]
    if samples:
        return fit_overhead(samples)
    hosts = [HostPart(*run["host"]) for run in results]  # an old archive without host samples
    if all(len(run["host"]) == 2 for run in results):  # an older one, without the prefill term
        steps = sorted(host.seconds(TYPICAL_ROWS) for host in hosts)
        return HostPart(steps[len(steps) // 2])
    terms = ("step", "row", "prompt")
    return HostPart(*(median(getattr(host, term) for host in hosts) for term in terms))


def host_of(recorded: dict[str, Any], host: Any) -> Any:
    """Return the host overhead of a run. With asynchronous scheduling, that of its own warm-up: it has other parts."""
    from servesim.costs.parts import HostPart

    overlaps = recorded["args"]["policy"].get("async_scheduling", False)
    return HostPart(*recorded["told"]["host"]) if overlaps else host


def read_recorded_run(recorded: dict[str, Any], profile: Any) -> tuple[Any, list[Any]]:
    """Return a recorded run, and a copy of its requests before the run."""
    from servesim.calibrate.live.request_json import requests_from_json
    from servesim.calibrate.replay.measured_run import run_from_result
    from servesim.calibrate.replay.replay import as_backend_scenario
    from servesim.config.scenario import scenario_from

    args = recorded["args"]
    scenario = as_backend_scenario(scenario_from({"policy": args["policy"], "engine": args["engine"]}))
    finished, unserved = (requests_from_json(args["requests"]) for _ in range(2))
    return run_from_result(scenario, profile, finished, recorded["told"]), unserved


def compare_run(recorded: dict[str, Any], profile: Any, host: Any, draws: int = 0, same_session: bool = False) -> Any:
    """Simulate one run from the profile and compare; `draws` give intervals."""
    from dataclasses import replace

    from servesim.calibrate.replay.replay import ReplayedScenario, simulate_and_compare
    from servesim.runs.run_folder import run_data

    live, requests = read_recorded_run(recorded, profile)
    name = recorded["setting"]
    replayed = ReplayedScenario(name, live, replace(run_data(live, live.decisions), name=name))
    simulate_and_compare(replayed, requests, profile, host, draws, same_session)
    return replayed.comparison


def describe_steps(recorded: dict[str, Any], profile: Any, host: Any) -> str:
    """Return one line: measured and predicted step seconds of a run by kind of step, and its host overhead."""
    from servesim.core import Shape

    sums: dict[str, list[float]] = {}
    measured = assumed = 0.0
    for start, called, end, *fields in recorded["told"]["calls"]:
        shape = Shape(*fields)
        kind = "mixed" if shape.prefill_rows and shape.decode_rows else "prefill" if shape.prefill_rows else "decode"
        pair = sums.setdefault(kind, [0.0, 0.0])
        pair[0] += end - called
        pair[1] += profile.cost.seconds(shape)
        measured += called - start
        assumed += host.seconds(shape.prefill_rows + shape.decode_live, shape.prefill_rows, shape.prefill_tokens)
    kinds = ", ".join(f"{kind} {a:.2f} s / {b:.2f} s = {a / b:.4f}" for kind, (a, b) in sorted(sums.items()) if b)
    return f"{recorded['workload']:<13}{recorded['setting']:<15} {kinds}; host {measured:.3f} s, {assumed:.3f} s"


def describe_decisions(recorded: dict[str, Any], comparison: Any) -> str:
    """Return one line: model calls of the simulation that match, and tokens that the prefix cache had."""
    matched, calls = comparison.calls_matched
    text = f"{'':<28} {matched} of {calls} model calls match with measured step times"
    cache = recorded["told"].get("prefix_cache")
    if not cache or not cache["requests"]:
        return text
    return (
        f"{text}; prefix cache: {cache['hits']} hits in {cache['queries']} tokens, {cache['evicted_blocks']} evictions"
    )


def heading(about: dict[str, Any], profile: Any) -> list[str]:
    """Return the lines above the table: device, versions, and the profile with its held-out error."""
    from servesim.calibrate.live.setup import name_of

    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    held_out = ", ".join(f"{kind} {100 * error['mean']:.1f} %" for kind, error in profile.error.items())
    return [
        f"{about['device']}, {name_of(about['model'])} ({about['dtype']}, {about['kernels']} kernels), {about['date']}",
        f"{versions}",
        f"profile: {profile.name}, held-out error {held_out}",
        "",
    ]


MIN_DIFFERENCE = 0.01  # one run per setting on the device cannot rank settings that differ by less
METRICS = {"makespan": "makespan", "mean_ttft_ms": "mean TTFT", "mean_tpot_ms": "mean TPOT", "p99_e2el_ms": "p99 E2EL"}


def table(comparisons: dict[str, list[Any]], repeated: dict[str, dict[str, Any]]) -> list[str]:
    """Return a Markdown table: the errors of every run, then median, worst and rank correlation per workload.

    The last row of a workload is its run-to-run variation: the stock setting repeated at the end of the session.
    """
    head = (
        "workload", "setting", "makespan (s)", *METRICS.values(), "from step times (makespan)", "preemptions",
        "equal calls",
    )  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for workload, runs in comparisons.items():
        lines += [run_row(workload, comparison) for comparison in runs]
        lines += [summary_row(workload, label, cells) for label, cells in summary_cells(runs).items()]
        if workload in repeated:
            stock = next(comparison for comparison in runs if comparison.name == "stock")
            changes = [abs(repeated[workload][metric] / stock.row(metric).measured - 1) for metric in METRICS]
            lines.append(summary_row(workload, "run-to-run variation", [f"{100 * m:.2f} %" for m in changes]))
    return lines


def run_row(workload: str, comparison: Any) -> str:
    """Return the row of one run: measured makespan, errors, preemptions measured (simulated), equal model calls.

    These are the leading calls that the simulation makes too if its steps take the measured times.
    """
    errors = [comparison.row(metric).error for metric in METRICS]
    makespan, preemptions = comparison.row("makespan"), comparison.row("preemptions")
    cells = [workload, comparison.name, f"{makespan.measured:.2f}", *map(format_error, errors)]
    cells += [format_error(makespan.from_step_times), f"{preemptions.measured:.0f} ({preemptions.simulated:.0f})"]
    cells.append("{} of {}".format(*comparison.calls_matched))
    return f"| {' | '.join(cells)} |"


def summary_cells(comparisons: Sequence[Any]) -> dict[str, list[str]]:
    """Return median and worst error and Kendall's tau of every metric, by row label."""
    from statistics import median

    from servesim.calibrate.replay.verify import rank_correlations

    sizes = [[abs(comparison.row(metric).error or 0.0) for comparison in comparisons] for metric in METRICS]
    tau = rank_correlations(list(comparisons), list(METRICS))
    return {
        "median error": [f"{100 * median(size):.2f} %" for size in sizes],
        "worst error": [f"{100 * max(size):.2f} %" for size in sizes],
        "rank agreement (Kendall's tau)": [format_tau(tau[metric]) for metric in METRICS],
        f"tau without pairs closer than {100 * MIN_DIFFERENCE:g} %": [
            format_tau(distinct_tau(comparisons, metric)) for metric in METRICS
        ],
    }


def summary_row(workload: str, label: str, cells: list[str]) -> str:
    """Return a summary row; its label is bold."""
    return f"| {workload} | **{label}** | | {' | '.join(cells)} | | | |"


def distinct_tau(comparisons: Sequence[Any], metric: str) -> float | None:
    """Return Kendall's tau-b over the pairs of settings whose measured values differ by MIN_DIFFERENCE or more."""
    values = [(comparison.row(metric).simulated, comparison.row(metric).measured) for comparison in comparisons]
    signs = [
        ((a > c) - (a < c), (b > d) - (b < d))
        for (a, b), (c, d) in itertools.combinations(values, 2)
        if abs(b - d) >= MIN_DIFFERENCE * max(abs(b), abs(d))
    ]
    scale = math.sqrt(sum(ours != 0 for ours, _ in signs) * sum(theirs != 0 for _, theirs in signs))
    return sum(ours * theirs for ours, theirs in signs) / scale if scale else None


def format_error(error: float | None) -> str:
    """Return an error in percent."""
    return "-" if error is None else f"{100 * error:+.2f} %"


def format_tau(tau: float | None) -> str:
    """Return Kendall's tau with two digits."""
    return "-" if tau is None else f"{tau:.2f}"

"""The table of h200_replay.py: every recorded run simulated from the profile of its sitting, and the errors."""

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

MANY = 32  # rows of a usual step


def compare_all(args: argparse.Namespace) -> int:
    """Fit the profile, simulate every run, and print and write the errors."""
    files = read(Path(args.compare))
    about = json.loads(files["about.json"])
    recorded = [json.loads(gzip.decompress(data)) for name, data in files.items() if is_run(name)]
    profile = profile_of(files, Path(args.compare)) if args.profile is None else named(args.profile)
    host = host_of_sitting(files, recorded)
    found: dict[str, list[Any]] = {}
    notes = []
    for run in sorted(recorded, key=lambda run: place(run["workload"])):
        found.setdefault(run["workload"], []).append(compared(run, profile, host))
        notes.append(steps_told(run, profile, host))
    again = [json.loads(gzip.decompress(data)) for name, data in files.items() if name.startswith("again/")]
    second = {run["workload"]: live_of(run, profile)[0].result() for run in again}
    lines = [*heading(about, profile), *table(found, second)]
    print("\n".join(lines))
    print(
        "\nseconds on the device, measured over the profile's, by kind of step; the host's part, measured and assumed"
    )
    print("\n".join(notes))
    if args.write:
        Path(args.write).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def is_run(name: str) -> bool:
    """Whether a file is a run to be judged."""
    return name.endswith(".json.gz") and not name.startswith("again/")


def place(workload: str) -> int:
    """Return where a workload comes in the table."""
    return list(WORKLOADS).index(workload) if workload in WORKLOADS else len(WORKLOADS)


def named(profile: str) -> Any:
    """Return a profile by its name or folder."""
    from servesim.costs.device_profile import load_profile

    return load_profile(profile)


def read(folder: Path) -> dict[str, bytes]:
    """Return the files of all archives of a folder; of the same file, the later archive's."""
    files: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*.tar.gz")):
        with tarfile.open(path) as archive:
            for entry in archive:
                data = archive.extractfile(entry)
                if data is not None:
                    files[entry.name] = data.read()
    return files


def profile_of(files: dict[str, bytes], folder: Path) -> Any:
    """Fit the probe's samples."""
    from servesim.calibrate.probe import fit

    samples = folder / "samples.csv"
    samples.write_bytes(files["samples.csv"])
    return fit.profile_from(samples, json.loads(files["about.json"]))


def host_of_sitting(files: dict[str, bytes], recorded: list[dict[str, Any]]) -> Any:
    """Return what the host adds to a step, as the sitting's calibrations saw it."""
    from statistics import median

    from servesim.calibrate.probe.host_overhead import Host, host_of

    told = [run["told"] for run in recorded]
    parts = json.loads(files.get("hosts.json", b"[]"))
    if not parts:  # calibrated without a server: warm-ups, in which nobody comes or goes, have to do
        parts = [part for run in told for part in run.get("host_parts", ())]
    if parts:
        return host_of(parts)
    hosts = [Host(*run["host"]) for run in told]  # recorded before every part was kept
    if all(len(run["host"]) == 2 for run in told):  # and before there was a term for prompts, which blurred rows
        steps = sorted(host.seconds(MANY) for host in hosts)
        return Host(steps[len(steps) // 2])
    terms = ("step", "row", "prompt")
    return Host(*(median(getattr(host, term) for host in hosts) for term in terms))


def live_of(recorded: dict[str, Any], profile: Any) -> tuple[Any, list[Any]]:
    """Return a recorded run, and its requests as they were sent."""
    from servesim.calibrate.replay.live_run import live_run
    from servesim.calibrate.replay.replay import as_run
    from servesim.config.scenario import scenario_from
    from servesim.core import Request
    from servesim.core.request import ASKED

    args = recorded["args"]
    scenario = as_run(scenario_from({"policy": args["policy"], "engine": args["engine"]}))
    filled, fresh = ([Request(**dict(zip(ASKED, row))) for row in args["requests"]] for _ in range(2))
    return live_run(scenario, profile, filled, recorded["told"]), fresh


def compared(recorded: dict[str, Any], profile: Any, host: Any) -> Any:
    """Simulate one run from the profile and compare."""
    from dataclasses import replace

    from servesim.calibrate.replay.replay import Replayed, compare_with
    from servesim.runs.run_folder import run_data

    live, requests = live_of(recorded, profile)
    name = recorded["setting"]
    replayed = Replayed(name, live, replace(run_data(live, live.decisions), name=name))
    compare_with(replayed, requests, profile, host)
    return replayed.comparison


def steps_told(recorded: dict[str, Any], profile: Any, host: Any) -> str:
    """Say how the profile was off on the steps of a run, and what the host took."""
    from servesim.core import Shape

    sums: dict[str, list[float]] = {}
    took = assumed = 0.0
    for start, called, end, *fields in recorded["told"]["calls"]:
        shape = Shape(*fields)
        kind = "mixed" if shape.prefill_rows and shape.decode_rows else "prefill" if shape.prefill_rows else "decode"
        pair = sums.setdefault(kind, [0.0, 0.0])
        pair[0] += end - called
        pair[1] += profile.cost.seconds(shape)
        took += called - start
        assumed += host.seconds(shape.prefill_rows + shape.decode_live, shape.prefill_rows, shape.prefill_tokens)
    parts = ", ".join(f"{kind} {a:.2f} s / {b:.2f} s = {a / b:.4f}" for kind, (a, b) in sorted(sums.items()) if b)
    return f"{recorded['workload']:<8}{recorded['setting']:<15} {parts}; host {took:.3f} s, {assumed:.3f} s"


def heading(about: dict[str, Any], profile: Any) -> list[str]:
    """Return what the figures were made with."""
    from servesim.calibrate.live.setup import name_of

    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    held_out = ", ".join(f"{kind} {100 * error['mean']:.1f} %" for kind, error in profile.error.items())
    return [
        f"{about['device']}, {name_of(about['model'])} ({about['dtype']}, {about['kernels']} kernels), {about['date']}",
        f"{versions}",
        f"profile: {profile.name}, held-out error {held_out}",
        "",
    ]


APART = 0.01  # settings closer than this are not ranked by one run of each on the device
METRICS = {"makespan": "makespan", "mean_ttft_ms": "mean ttft", "mean_tpot_ms": "mean tpot", "p99_e2el_ms": "p99 e2el"}


def table(found: dict[str, list[Any]], second: dict[str, dict[str, Any]]) -> list[str]:
    """Return the errors, their medians, and whether ranks hold, as a Markdown table.

    A workload ends with the stock setting once more at the end of the sitting: how far a device is from itself.
    """
    from statistics import median

    from servesim.calibrate.replay.verify import ranks

    lines = [
        "| workload | setting | makespan (s) | "
        + " | ".join(METRICS.values())
        + " | from step times (makespan) | evictions |"
    ]
    lines.append("|" + "---|" * (len(METRICS) + 5))
    for workload, comparisons in found.items():
        for one in comparisons:
            errors = [one.line(metric).error for metric in METRICS]
            makespan, evictions = one.line("makespan"), one.line("evictions")
            cells = [workload, one.name, f"{makespan.measured:.2f}", *map(shown, errors), shown(makespan.steps)]
            lines.append(f"| {' | '.join(cells)} | {evictions.measured:.0f} ({evictions.simulated:.0f}) |")
        medians = [median(abs(one.line(metric).error or 0.0) for one in comparisons) for metric in METRICS]
        worst = [max(abs(one.line(metric).error or 0.0) for one in comparisons) for metric in METRICS]
        tau = ranks(comparisons, list(METRICS))
        lines.append(f"| {workload} | **median** | | {' | '.join(f'{100 * m:.2f} %' for m in medians)} | | |")
        lines.append(f"| {workload} | **worst** | | {' | '.join(f'{100 * m:.2f} %' for m in worst)} | | |")
        lines.append(f"| {workload} | **Kendall's tau** | | {' | '.join(f'{tau[m] or 0:.2f}' for m in METRICS)} | | |")
        tau = {metric: tau_apart(comparisons, metric) for metric in METRICS}
        label = f"**tau of settings {APART:.0%} apart**"
        lines.append(f"| {workload} | {label} | | {' | '.join(f'{tau[m] or 0:.2f}' for m in METRICS)} | | |")
        if workload in second:
            first = next(one for one in comparisons if one.name == "stock")
            off = [abs(second[workload][metric] / first.line(metric).measured - 1) for metric in METRICS]
            label = "**the device against itself**"
            lines.append(f"| {workload} | {label} | | {' | '.join(f'{100 * m:.2f} %' for m in off)} | | |")
    return lines


def tau_apart(comparisons: Sequence[Any], metric: str) -> float | None:
    """Return Kendall's tau-b over the pairs of settings that were measured APART or more from each other."""
    values = [(one.line(metric).simulated, one.line(metric).measured) for one in comparisons]
    signs = [
        ((a > c) - (a < c), (b > d) - (b < d))
        for (a, b), (c, d) in itertools.combinations(values, 2)
        if abs(b - d) >= APART * max(abs(b), abs(d))
    ]
    scale = math.sqrt(sum(ours != 0 for ours, _ in signs) * sum(theirs != 0 for _, theirs in signs))
    return sum(ours * theirs for ours, theirs in signs) / scale if scale else None


def shown(error: float | None) -> str:
    """Return an error in percent."""
    return "-" if error is None else f"{100 * error:+.2f} %"

"""Draw the charts of README and docs from simulations: python tools/doc_charts.py [NAME ...] writes docs/pictures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import matplotlib
import pandas as pd
import servesim
import yaml
from proof_table import groups, median_error, rivals_of, rows_of
from run_doc_examples import ROOT
from servesim.costs.device_profile import bundled_profiles
from servesim.files.chart_style import LIGHT, matplotlib_style
from servesim.frames.run import Result

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GREEN, RUST, BLUE, GREY, AMBER, VIOLET = (
    LIGHT[name] for name in ("winner", "baseline", "front", "point", "queued", "swapped")
)
ASCEND = "ascend910b4-llama2-7b"
H200_RESULTS = ROOT / "benchmarks" / "results" / "h200.md"
GPU_METRICS = ("makespan", "mean TTFT", "mean TPOT", "p99 E2EL")
SHORT_PADDING = {"engine.prefill_buckets": [520]}
# Steps of the tutorial: name, request rate X of the client, settings.
STEPS: dict[str, tuple[float, dict[str, Any]]] = {
    "stock\n(1 slot, X = 0.5)": (0.5, {}),
    "64 slots,\nX = 5": (5, {"policy.decode_batch": 64}),
    "prompts padded\nto 520, not 4096": (5, {"policy.decode_batch": 64, **SHORT_PADDING}),
    "X = 30\ninstead of 5": (30, {"policy.decode_batch": 64, **SHORT_PADDING}),
    "8 prompts\nper prefill": (30, {"policy.decode_batch": 64, "policy.prefill_batch": 8, **SHORT_PADDING}),
    "longest output\nlimit first": (
        30, {"policy.decode_batch": 64, "policy.prefill_batch": 8, "policy.order": "longest-output", **SHORT_PADDING}
    ),
    "128 slots\n(outside profile)": (
        30, {"policy.decode_batch": 128, "policy.prefill_batch": 8, "policy.order": "longest-output", **SHORT_PADDING}
    ),
}  # fmt: skip
REPORTED = {
    "stock\n(1 slot, X = 0.5)": 3551.9,
    "64 slots,\nX = 5": 791.1,
}  # makespan in seconds on the device: from the organisers, and from team ccdd (official)


def run(X: float, settings: dict[str, Any], decisions: bool = False) -> Result:
    """Simulate the 1,500 requests of the contest."""
    workload = {"contest": {"X": X, "T": 1500 / X * (1 + 1e-9)}}
    return servesim.run(preset="contest-baseline", workload=workload, settings=settings, decisions=decisions)


def overview() -> Any:
    """A sweep on the left; simulated against measured runs next to it."""
    panels = [sweep_scatter, ascend_errors, *([gpu_errors] if H200_RESULTS.is_file() else [])]
    figure, all_axes = plt.subplots(1, len(panels), figsize=(3.8 * len(panels), 4.2))
    for draw, axes in zip(panels, all_axes):
        draw(axes)
    return figure


def sweep_scatter(axes: Any) -> None:
    """Draw mean TTFT against mean end-to-end latency for every configuration of the demo."""
    sweep = servesim.sweep(ROOT / "examples" / "contest_knobs.yaml", jobs=None)
    table = sweep.table[sweep.table.eligible]
    e2e, ttft = table.mean_e2el_ms / 1e3, table.mean_ttft_ms / 1e3
    axes.scatter(e2e, ttft, s=14, color=GREY, label=f"{len(table)} configurations")
    front = ttft[e2e.sort_values().index].cummin().drop_duplicates()
    axes.plot(e2e[front.index], front, ".-", color=BLUE, lw=0.8, label="Pareto front")
    axes.scatter(e2e[0], ttft[0], s=70, marker="X", color=RUST, label="baseline")
    axes.scatter(e2e[sweep.winner], ttft[sweep.winner], s=110, marker="*", color=GREEN, label="winner")
    axes.set(xlabel="mean end-to-end latency (s)", ylabel="mean TTFT (s)", yscale="log")
    axes.set_ylim(0.4, 130)
    axes.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.set_title("sweep: settings of llm-serving", fontsize="medium", loc="left")
    axes.legend(fontsize="small", loc="upper left", frameon=False)


def ascend_errors(axes: Any) -> None:
    """Draw the makespan error of the Ascend profile: runs it was fitted to, and runs it only predicts."""
    about = yaml.safe_load((bundled_profiles()[ASCEND] / "profile.yaml").read_text(encoding="utf-8"))
    kinds = [pd.DataFrame(about["fit"][kind]).assign(kind=kind) for kind in ("predicted", "fitted")]
    runs = pd.concat(kinds).iloc[::-1]
    colours = runs.kind.map({"fitted": GREY, "predicted": BLUE})
    labels = [f"{run}, {seconds:,.0f} s" for run, seconds in zip(runs.run, runs.measured_s)]
    axes.scatter(100 * runs.error, labels, color=colours, s=26, zorder=3)
    for kind, colour in (("predicted", BLUE), ("fitted", GREY)):
        axes.scatter([], [], color=colour, s=26, label=kind)
    draw_error_axis(axes, 2, 100 * runs.error, "makespan: simulated - measured (%)")
    axes.tick_params(axis="y", labelsize="small")
    axes.set_title(f"accuracy: {len(runs)} runs, Ascend 910B4", fontsize="medium", loc="left")


def gpu_errors(axes: Any) -> None:
    """Draw the errors of all settings replayed on a GPU: one line per metric, one dot per setting."""
    lines = H200_RESULTS.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    runs = pd.DataFrame(rows[1:], columns=rows[0])
    runs = runs[~runs.setting.str.contains(r"\*\*")]
    errors = runs[list(GPU_METRICS)].apply(lambda column: column.str.rstrip(" %").astype(float))
    colours = dict(zip(runs.workload.unique(), (BLUE, AMBER, GREEN)))
    for index, (name, colour) in enumerate(colours.items()):
        group = errors[runs.workload == name]
        for height, metric in enumerate(reversed(GPU_METRICS)):
            label = f"{name}, {len(group)} settings" if height == 0 else None
            axes.scatter(
                group[metric],
                [height + 0.28 * ((len(colours) - 1) / 2 - index)] * len(group),
                s=26,
                alpha=0.7,
                color=colour,
                lw=0,
                label=label,
            )
    draw_error_axis(axes, 5, errors.stack(), "simulated - measured (%)")
    axes.set_ylim(-1.8, len(GPU_METRICS) - 0.5)
    axes.set_yticks(range(len(GPU_METRICS)), list(reversed(GPU_METRICS)))
    axes.set_title(f"accuracy: {len(runs)} runs, {lines[0].partition(',')[0]}", fontsize="medium", loc="left")


def draw_error_axis(axes: Any, band: float, errors: Any, label: str) -> None:
    """Draw the zero line and a tolerance band, and scale the axis to include all errors."""
    axes.axvline(0, color="black", lw=0.8, zorder=1)
    axes.axvspan(-band, band, color=GREEN, alpha=0.08, lw=0, label=f"within {band} %")
    limit = max(1.15 * band, 1.1 * errors.abs().max())
    axes.set(xlim=(-limit, limit), xlabel=label)
    axes.tick_params(axis="y", length=0)
    axes.legend(fontsize="small", loc="lower left", frameon=False, handletextpad=0.2, borderpad=0.1)


def tutorial_steps() -> Any:
    """Makespan after each step of the tutorial."""
    figure, axes = plt.subplots(figsize=(11, 3.8))
    spans = [run(*step).metrics["makespan"] for step in STEPS.values()]
    bars = axes.bar(list(STEPS), spans, color=BLUE, width=0.6, label="simulated")
    axes.bar_label(bars, [f"{span:,.0f} s" for span in spans], padding=2)
    reported = [list(STEPS).index(name) for name in REPORTED]
    axes.scatter(
        reported, list(REPORTED.values()), marker="_", s=900, color=RUST, lw=2.5, label="reported from the device"
    )
    axes.set(yscale="log", ylim=(150, 6000), ylabel="makespan of 1,500 requests\n(s, log scale)")
    axes.set_yticks([200, 500, 1000, 2000, 4000], ["200", "500", "1000", "2000", "4000"])
    axes.minorticks_off()
    axes.legend(fontsize="small", frameon=False)
    return figure


def batch_drain() -> Any:
    """How the batch drains at the end of a run: in order of arrival, and longest output first."""
    figure, panels = plt.subplots(2, 1, figsize=(10, 4.4), sharex=True)
    for axes, name in zip(panels, ("8 prompts\nper prefill", "longest output\nlimit first")):
        steps = run(*STEPS[name], decisions=True).decisions
        assert steps is not None
        axes.fill_between(steps.t, 0.8, steps.running, step="post", color=GREEN, alpha=0.35, lw=0, label="running")
        axes.step(steps.t, steps.waiting, where="post", color=AMBER, label="waiting")
        axes.set(yscale="log", ylim=(0.8, 1.5 * steps.waiting.max()), ylabel="requests (log scale)")
        title = "longest output limit first" if name.startswith("longest") else "in order of arrival"
        axes.set_title(f"{title}: makespan {steps.t_end.iloc[-1]:.0f} s", fontsize="medium", loc="left")
    panels[0].legend(fontsize="small", loc="upper right")
    panels[1].set(xlabel="time (s)")
    return figure


def proof() -> Any:
    """Median errors of predicted runs, one line per set, one dot per figure: servesim and other simulators."""
    ours: dict[str, list[float]] = {}
    others: dict[str, list[float]] = {}
    for name, _, rows in groups(rows_of()):
        ours.setdefault(name, []).append(max(0.05, 100 * median_error(rows)))
        others.setdefault(name, []).extend(max(0.05, 100 * error) for error in rivals_of(rows).values())
    names = sorted(ours, key=lambda name: bool(others[name]))  # with other simulators at the top
    figure, axes = plt.subplots(figsize=(9, 0.9 + 0.27 * len(names)))
    for errors, colour, size, label in (
        (others, GREY, 24, "other simulators, the same runs"), (ours, GREEN, 32, "servesim"),
    ):  # fmt: skip
        dots = [(error, height) for height, name in enumerate(names) for error in errors[name]]
        axes.scatter(*zip(*dots), s=size, color=colour, label=label, zorder=3 if errors is ours else 2)
    axes.set(xscale="log", xlabel="median absolute error (%, log scale; 0.05 stands for less)", ylim=(-0.7, len(names)))
    axes.set_xticks([0.05, 0.2, 1, 5, 20, 100, 500], ["0.05", "0.2", "1", "5", "20", "100", "500"])
    axes.minorticks_off()
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.grid(axis="y", lw=0.3)
    axes.legend(fontsize="small", loc="lower right")
    return figure


CHARTS: dict[str, Callable[[], Any]] = {
    "overview": overview,
    "journey": tutorial_steps,
    "tail": batch_drain,
    "proof": proof,
}


if __name__ == "__main__":
    folder = ROOT / "docs" / "pictures"
    folder.mkdir(exist_ok=True)
    for name in sys.argv[1:] or CHARTS:
        with matplotlib_style():
            CHARTS[name]().savefig(folder / f"{name}.png", dpi=140)
        print(folder.relative_to(ROOT) / f"{name}.png")

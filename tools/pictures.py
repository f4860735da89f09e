"""The pictures of README and docs, drawn from real output: python tools/pictures.py [NAME ...] writes docs/pictures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import matplotlib
import pandas as pd
import servesim
import yaml
from pages import ROOT
from servesim.costs.device_profile import bundled
from servesim.frames import Result

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GREEN, RUST, BLUE, GREY, AMBER, VIOLET = "#0b6e4f", "#b3541e", "#3b5bdb", "#9aa1ab", "#e0a33e", "#7a5bb5"
ASCEND = "ascend910b4-llama2-7b"
HARDWARE = ROOT / "benchmarks" / "results" / "h200.md"
GPU_FIGURES = ("makespan", "mean ttft", "mean tpot", "p99 e2el")
PADDED = {"engine.prefill_gears": [520]}
# What the tutorial does, step by step: its name, the client's X, what is set.
STEPS: dict[str, tuple[float, dict[str, Any]]] = {
    "stock": (0.5, {}),
    "batch of 64": (5, {"policy.decode_batch": 64}),
    "prompts padded\nto 520, not 4096": (5, {"policy.decode_batch": 64, **PADDED}),
    "sent faster": (30, {"policy.decode_batch": 64, **PADDED}),
    "8 prompts\na prefill": (30, {"policy.decode_batch": 64, "policy.prefill_batch": 8, **PADDED}),
    "longest first": (
        30, {"policy.decode_batch": 64, "policy.prefill_batch": 8, "policy.order": "longest-output", **PADDED}
    ),
}  # fmt: skip
REPORTED = {"stock": 3551.9, "batch of 64": 791.1}  # seconds on the device: the organisers, and team ccdd (official)


def run(X: float, settings: dict[str, Any], turns: bool = False) -> Result:
    """Run the contest's 1,500 requests."""
    workload = {"contest": {"X": X, "T": 1500 / X * (1 + 1e-9)}}
    return servesim.run(preset="contest-baseline", workload=workload, settings=settings, turns=turns)


def overview() -> Any:
    """What is in it for you: a sweep on the left, simulated against measured beside it."""
    draws = [swept, against_ascend, *([against_gpu] if HARDWARE.is_file() else [])]
    figure, panels = plt.subplots(1, len(draws), figsize=(3.8 * len(draws), 4.2), layout="constrained")
    for draw, axes in zip(draws, panels):
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def swept(axes: Any) -> None:
    """Draw every configuration of the demo's sweep by two of its figures."""
    found = servesim.sweep(ROOT / "examples" / "contest_knobs.yaml", jobs=None)
    table = found.table[found.table.eligible]
    whole, first = table.mean_e2el_ms / 1e3, table.mean_ttft_ms / 1e3
    axes.scatter(whole, first, s=14, color=GREY, label=f"{len(table)} configurations")
    front = first[whole.sort_values().index].cummin().drop_duplicates()
    axes.plot(whole[front.index], front, ".-", color=BLUE, lw=0.8, label="not beaten in both")
    axes.scatter(whole[0], first[0], s=70, marker="X", color=RUST, label="baseline")
    axes.scatter(whole[found.winner], first[found.winner], s=110, marker="*", color=GREEN, label="winner")
    axes.set(xlabel="mean time to the whole answer (s)", ylabel="mean time to first token (s)", yscale="log")
    axes.set_ylim(0.4, 130)
    axes.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.set_title("sweep: knobs of llm-serving", fontsize="medium", loc="left")
    axes.legend(fontsize="small", loc="upper left", frameon=False)


def against_ascend(axes: Any) -> None:
    """Draw what the Ascend profile says of real runs, those it was fitted to and those it never saw."""
    about = yaml.safe_load((bundled()[ASCEND] / "profile.yaml").read_text(encoding="utf-8"))
    kinds = [pd.DataFrame(about["fit"][kind]).assign(kind=kind) for kind in ("predicted", "fitted")]
    runs = pd.concat(kinds).iloc[::-1]
    colours = runs.kind.map({"fitted": GREY, "predicted": BLUE})
    labels = [f"{run}, {seconds:,.0f} s" for run, seconds in zip(runs.run, runs.measured_s)]
    axes.scatter(100 * runs.error, labels, color=colours, s=26, zorder=3)
    for kind, colour in (("predicted", BLUE), ("fitted to", GREY)):
        axes.scatter([], [], color=colour, s=26, label=kind)
    bounds(axes, 2, 100 * runs.error, "makespan: simulated - measured (%)")
    axes.tick_params(axis="y", labelsize="small")
    axes.set_title(f"check: {len(runs)} reported runs, Ascend 910B4", fontsize="medium", loc="left")


def against_gpu(axes: Any) -> None:
    """Draw the errors of every setting that was replayed on a GPU: a line a figure, a dot a setting."""
    lines = HARDWARE.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    runs = pd.DataFrame(rows[1:], columns=rows[0])
    runs = runs[~runs.setting.str.contains(r"\*\*")]
    errors = runs[list(GPU_FIGURES)].apply(lambda column: column.str.rstrip(" %").astype(float))
    colours = dict(zip(runs.workload.unique(), (BLUE, AMBER, GREEN)))
    for place, (name, colour) in enumerate(colours.items()):
        mine = errors[runs.workload == name]
        for height, figure in enumerate(reversed(GPU_FIGURES)):
            label = f"{name}, {len(mine)} settings" if height == 0 else None
            axes.scatter(
                mine[figure],
                [height + 0.28 * ((len(colours) - 1) / 2 - place)] * len(mine),
                s=26,
                alpha=0.7,
                color=colour,
                lw=0,
                label=label,
            )
    bounds(axes, 5, errors.stack(), "simulated - measured (%)")
    axes.set_ylim(-1.2, len(GPU_FIGURES) - 0.5)
    axes.set_yticks(range(len(GPU_FIGURES)), list(reversed(GPU_FIGURES)))
    axes.set_title(f"replay: {lines[0].partition(',')[0]}", fontsize="medium", loc="left")


def bounds(axes: Any, band: float, errors: Any, label: str) -> None:
    """Give an axis of errors its zero, a band, and room for what lies outside it."""
    axes.axvline(0, color="black", lw=0.8, zorder=1)
    axes.axvspan(-band, band, color=GREEN, alpha=0.08, lw=0)
    most = max(1.15 * band, 1.1 * errors.abs().max())
    axes.set(xlim=(-most, most), xlabel=label)
    axes.tick_params(axis="y", length=0)
    axes.legend(fontsize="small", loc="lower left", frameon=False, handletextpad=0.2, borderpad=0.1)


def journey() -> Any:
    """The steps of the tutorial."""
    figure, axes = plt.subplots(figsize=(10, 3.8), layout="constrained")
    spans = [run(*step).figures["makespan"] for step in STEPS.values()]
    bars = axes.bar(list(STEPS), spans, color=BLUE, width=0.6, label="simulated")
    axes.bar_label(bars, [f"{span:,.0f} s" for span in spans], padding=2)
    reported = [list(STEPS).index(name) for name in REPORTED]
    axes.scatter(
        reported, list(REPORTED.values()), marker="_", s=900, color=RUST, lw=2.5, label="reported from the device"
    )
    axes.set(yscale="log", ylim=(150, 6000), ylabel="makespan of 1,500 requests (s)")
    axes.set_yticks([200, 500, 1000, 2000, 4000], ["200", "500", "1000", "2000", "4000"])
    axes.minorticks_off()
    axes.legend(fontsize="small", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def tail() -> Any:
    """Why the longest go first: the batch towards the end of a run."""
    figure, panels = plt.subplots(2, 1, figsize=(10, 4.4), sharex=True, layout="constrained")
    for axes, name in zip(panels, ("8 prompts\na prefill", "longest first")):
        turns = run(*STEPS[name], turns=True).turns
        assert turns is not None
        axes.fill_between(turns.t, turns.running, step="post", color=GREEN, alpha=0.35, lw=0, label="running")
        axes.step(turns.t, turns.waiting, where="post", color=AMBER, label="waiting")
        axes.set(ylim=(0, 80), ylabel="requests")
        title = "longest output first" if name == "longest first" else "in order of arrival"
        axes.set_title(f"{title}: done after {turns.t_end.iloc[-1]:.0f} s", fontsize="medium", loc="left")
    panels[0].legend(fontsize="small", loc="upper right")
    panels[1].set(xlabel="time (s)")
    return figure


PICTURES: dict[str, Callable[[], Any]] = {"overview": overview, "journey": journey, "tail": tail}


if __name__ == "__main__":
    folder = ROOT / "docs" / "pictures"
    folder.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]().savefig(folder / f"{name}.png", dpi=140)
        print(folder.relative_to(ROOT) / f"{name}.png")

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
from servesim.frames import Result
from servesim.profile import bundled

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GREEN, RUST, BLUE, GREY, AMBER, VIOLET = "#0b6e4f", "#b3541e", "#3b5bdb", "#9aa1ab", "#e0a33e", "#7a5bb5"
ASCEND = "ascend910b4-llama2-7b"
HARDWARE = ROOT / "benchmarks" / "results" / "h200.md"
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
    """What is in it for you: a sweep on the left, simulated against measured on the right."""
    width = [1.2, 1, 1] if HARDWARE.is_file() else [1.2, 1]
    figure, (left, *rest) = plt.subplots(
        1, len(width), figsize=(5 * len(width), 4.3), width_ratios=width, layout="constrained"
    )
    found = servesim.sweep(ROOT / "examples" / "contest_knobs.yaml", replications=1, jobs=None)
    table = found.table[found.table.eligible]
    seconds = table.mean_ttft_ms / 1e3
    left.scatter(table.makespan, seconds, s=14, color=GREY, label=f"{len(table)} configurations")
    front = seconds[table.makespan.sort_values().index].cummin().drop_duplicates()
    left.plot(table.makespan[front.index], front, ".-", color=BLUE, lw=0.8, label="none is better in both")
    left.scatter(table.makespan[0], seconds[0], s=70, marker="X", color=RUST, label="baseline")
    left.scatter(table.makespan[found.winner], seconds[found.winner], s=110, marker="*", color=GREEN, label="winner")
    left.set(xlabel="makespan of 1,500 requests (s)", ylabel="mean time to first token (s)")
    left.set_title("swept: scheduling knobs of llm-serving, 200 KV blocks", fontsize="medium")
    left.legend(fontsize="small")
    for draw, axes in zip((against_ascend, against_gpu), rest):
        draw(axes)
    return figure


def against_ascend(axes: Any) -> None:
    """Draw what the Ascend profile says of real runs, those it was fitted to and those it never saw."""
    about = yaml.safe_load((bundled()[ASCEND] / "profile.yaml").read_text(encoding="utf-8"))
    kinds = [pd.DataFrame(about["fit"][kind]).assign(kind=kind) for kind in ("predicted", "fitted")]
    runs = pd.concat(kinds).iloc[::-1]
    colours = runs.kind.map({"fitted": GREY, "predicted": BLUE})
    labels = [f"{run}, {seconds:,.0f} s" for run, seconds in zip(runs.run, runs.measured_s)]
    axes.barh(labels, 100 * runs.error, color=colours, height=0.6)
    for kind, colour in (("predicted, never fitted to", BLUE), ("fitted to", GREY)):
        axes.barh(labels[:1], 0, color=colour, label=kind)
    axes.axvline(0, color="black", lw=0.8)
    axes.axvspan(-2, 2, color=GREEN, alpha=0.08, lw=0)
    axes.set(xlim=(-3, 6), xlabel="makespan: simulated - measured (%)")
    axes.tick_params(axis="y", labelsize="small", length=0)
    axes.set_title("checked: reported runs on Ascend 910B4, batch 1 to 128", fontsize="medium")
    axes.legend(fontsize="small", loc="lower right")


def against_gpu(axes: Any) -> None:
    """Draw the errors of every setting that was replayed on a GPU."""
    lines = HARDWARE.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    runs = pd.DataFrame(rows[1:], columns=list(range(len(rows[0]))))
    runs = runs[~runs[1].str.contains(r"\*\*")].iloc[::-1]
    names = rows[0]
    shown = {"makespan": BLUE, "mean ttft": AMBER, "mean tpot": GREEN, "p99 e2el": VIOLET}
    labels = runs[0] + ": " + runs[1]
    for name, colour in shown.items():
        error = runs[names.index(name)].str.rstrip(" %").astype(float)
        axes.scatter(error, labels, s=14, color=colour, label=name)
    axes.axvline(0, color="black", lw=0.8)
    axes.axvspan(-5, 5, color=GREEN, alpha=0.08, lw=0)
    axes.set(xlim=(-7, 12), xlabel="simulated - measured (%)")
    axes.tick_params(axis="y", labelsize="x-small", length=0)
    axes.set_title(f"replayed: {lines[0].partition(',')[0]}, second sitting", fontsize="medium")
    axes.legend(fontsize="x-small", loc="lower right")


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
        PICTURES[name]().savefig(folder / f"{name}.png", dpi=110)
        print(folder.relative_to(ROOT) / f"{name}.png")

"""Draw the charts of README and docs from simulations: python tools/doc_charts.py [NAME ...] writes docs/pictures."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import servesim
from proof_table import groups, median_error, rivals_of, rows_of
from run_doc_examples import ROOT
from servesim.files.chart_style import LIGHT, matplotlib_style
from servesim.frames.run import Result

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GREEN, RUST, BLUE, GREY, AMBER = (LIGHT[name] for name in ("winner", "baseline", "front", "point", "queued"))
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


def answers() -> Any:
    """Three questions about Llama 3.1 8B on H100, and their answers."""
    figure, (settings, load, replicas) = plt.subplots(1, 3, figsize=(11.4, 4.2))
    figure.suptitle("vLLM, Llama 3.1 8B on H100, prompts of 1,200 and answers of 200 tokens", fontsize="medium")
    draw_settings(settings)
    draw_loads(load, [("policy.max_num_seqs", value) for value in (32, 64, 128)], range(4, 33, 4))
    load.set_title("How much load does one GPU hold?", loc="left", fontsize="medium")
    draw_loads(replicas, [("cluster.replicas", value) for value in (1, 2, 3)], range(10, 91, 10))
    replicas.set_title("How many replicas does it need?", loc="left", fontsize="medium")
    return figure


def serve(rate: float, **settings: Any) -> Mapping[str, Any]:
    """Simulate vLLM with random requests: prompts of 1,200 tokens and answers of 200 on average."""
    lengths = {"kind": "lognormal", "prompt": {"mean": 1200, "sd": 600}, "output": {"mean": 200, "sd": 100}}
    workload = {"requests": int(60 * rate), "arrivals": {"kind": "poisson", "rate": rate}, "lengths": lengths}
    profile = {"model": "llama-3.1-8b", "device": "H100"}
    return servesim.run(policy="vllm-v1", profile=profile, workload=workload, settings=settings).metrics


def draw_settings(axes: Any) -> None:
    """P99 of TTFT and of the gaps between tokens, one point per number of tokens in a step."""
    sizes = [256, 512, 1024, 2048, 8192]
    runs = [serve(16, **{"policy.max_num_batched_tokens": size}) for size in sizes]
    points = [(run["p99_ttft_ms"] / 1000, run["p99_itl_ms"]) for run in runs]
    axes.plot(*zip(*points), color=GREY, lw=1, zorder=1)
    axes.scatter(*zip(*points), color=[GREEN if x <= 0.5 and y <= 40 else GREY for x, y in points], zorder=2)
    for size, point in zip(sizes, points):
        axes.annotate(f"{size:,}", point, xytext=(6, 5), textcoords="offset points", size="small")
    axes.axvline(0.5, color=RUST, ls=":")
    axes.annotate("limit 0.5 s", (0.52, 0.95), xycoords=("data", "axes fraction"), color=RUST, size="small")
    axes.axhline(40, color=RUST, ls=":")
    axes.annotate("limit 40 ms", (0.98, 41), xycoords=("axes fraction", "data"), ha="right", color=RUST, size="small")
    axes.set(xlabel="P99 TTFT (s), at 16 requests/s", ylabel="P99 gap between tokens (ms)", xscale="log", xlim=(0.2, 2))
    show_ticks(axes.xaxis, [0.2, 0.5, 1, 2])
    axes.set_title("Which max_num_batched_tokens?", loc="left", fontsize="medium")


def draw_loads(axes: Any, settings: list[tuple[str, int]], rates: Sequence[float]) -> None:
    """P99 of TTFT over the load, one line per value of a setting."""
    for (key, value), colour in zip(settings, (AMBER, BLUE, GREEN)):
        values = [serve(rate, **{key: value})["p99_ttft_ms"] / 1000 for rate in rates]
        axes.plot(rates, values, color=colour, marker="o", ms=4, label=f"{key.rpartition('.')[2]} {value}")
    axes.axhline(1, color=RUST, ls=":")
    axes.annotate("limit 1 s", (0.98, 1.06), xycoords=("axes fraction", "data"), ha="right", color=RUST, size="small")
    axes.set(xlabel="load (requests/s)", ylabel="P99 TTFT (s)", yscale="log", ylim=(0.05, 20))
    show_ticks(axes.yaxis, [0.1, 0.2, 0.5, 1, 2, 5, 10])
    axes.legend(fontsize="small", loc="lower right")


def show_ticks(axis: Any, values: Sequence[float]) -> None:
    """Label a logarithmic axis with plain numbers."""
    axis.set_ticks(values, [f"{value:g}" for value in values])
    axis.set_ticks([], minor=True)


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
        across, up = zip(*dots)
        axes.scatter(across, up, s=size, color=colour, label=label, zorder=3 if errors is ours else 2)
    axes.set(xscale="log", xlabel="median absolute error (%, log scale; 0.05 stands for less)", ylim=(-0.7, len(names)))
    axes.set_xticks([0.05, 0.2, 1, 5, 20, 100, 500], ["0.05", "0.2", "1", "5", "20", "100", "500"])
    axes.minorticks_off()
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.grid(axis="y", lw=0.3)
    axes.legend(fontsize="small", loc="lower right")
    return figure


CHARTS: dict[str, Callable[[], Any]] = {
    "answers": answers,
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

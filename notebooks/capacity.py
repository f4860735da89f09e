# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What request rate can my server take within my latency bounds, and with which settings?
# For engineers who run vLLM: here Llama-2-7B on one H200. The last section has the answer, and its command line.
#
# Set the parameters in the next cell.

# %% tags=["parameters"]
BASE = {
    "preset": "vllm-v1-0.32",
    "profile": "h200-llama2-7b",  # step times of one device and model
    "engine": {"device_memory": "H200"},  # computes the number of KV blocks, as vLLM does
    "workload": {
        "requests": 2000,
        "arrivals": {"kind": "poisson", "rate": 10},
        "lengths": {"kind": "lognormal", "prompt": {"mean": 700, "sd": 600}, "output": {"mean": 200, "sd": 150}},
    },
}
BOUNDS = ["p99_ttft_ms <= 1000", "p95_tpot_ms <= 20"]  # a configuration that misses one of them cannot win
KNOBS = {"policy.max_num_seqs": [64, 256], "policy.max_num_batched_tokens": [512, 1024, 2048, 8192]}
NAMES = {"policy.max_num_seqs": "sequences", "policy.max_num_batched_tokens": "tokens per step"}
RATES = [10, 15, 20, 25]  # requests per second
REPLICATIONS = 3  # runs of each configuration and rate, with different random numbers
PRECISION = 0.02  # of the highest rates
MODEL = "meta-llama/Llama-2-7b-hf"  # on the command line of the server
JOBS = None  # processes; None: one per core

# %%
import matplotlib.pyplot as plt
import pandas as pd
import servesim
from IPython.display import Markdown, display
from servesim.runs.metric_table import metric_title, title_inside

plt.rcParams.update({
    "figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3, "figure.dpi": 85, "font.size": 9,
    "axes.titlesize": 10,
})  # fmt: skip
COLOURS = ["#0b6e4f", "#b3541e", "#3b5bdb", "#7a5bb5", "#e0a33e", "#888888"]
LIMITS = {bound.split()[0]: float(bound.split()[2]) for bound in BOUNDS}  # milliseconds
TICKS = [n * 10**power for power in range(6) for n in (1, 2, 5)]


def draw(curves: pd.DataFrame, names: dict[int, str], title: str, sentence: str) -> None:
    """Draw the metric of each bound over the rate, one colour per configuration, and write a sentence below."""
    figure, panels = plt.subplots(1, len(LIMITS), figsize=(9.4, 3.1))
    for axes, (metric, limit) in zip(panels, LIMITS.items()):
        for (config, name), colour in zip(names.items(), COLOURS):
            points = curves[curves.config == config].sort_values("rate")
            axes.plot(points.rate, points[metric], color=colour, lw=1.5, marker="o", ms=4.5, label=name)
            fills = [colour if meets else "white" for meets in points.meets]
            axes.scatter(points.rate, points[metric], s=22, c=fills, edgecolors=colour, zorder=3)
        axes.axhline(limit, color="black", ls=":", label="bound")
        axes.scatter([], [], s=22, c="white", edgecolors="black", label="misses a bound")
        axes.set(xlabel="request rate (req/s)", ylabel="milliseconds", title=metric_title(metric), yscale="log")
        low, high = axes.get_ylim()
        axes.set_yticks([tick for tick in TICKS if low <= tick <= high])
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_minor_formatter("")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", title=title)
    plt.show()
    display(Markdown(sentence))


def why_not(reason: str) -> str:
    """Return why a rate is too high."""
    words = reason.split()
    return f"the {title_inside(words[1])} is above its bound" if words[0] == "misses" else reason


# %% [markdown]
# ## Capacity of the default settings
# The highest request rate that meets all bounds, by bisection. Every rate has the same requests; only their arrival
# times change.

# %%
stock = servesim.capacity(BASE, subject_to=BOUNDS, precision=PRECISION, jobs=JOBS)
found = stock.capacity.loc[0]
draw(
    stock.curves,
    {0: "defaults"},
    "configuration",
    f"The defaults take {found.capacity:.1f} requests per second. At {found.missed_at:.1f}, {why_not(found.reason)}.",
)

# %% [markdown]
# ## Configurations over the rate
# Every configuration runs at every rate. Bisection then finds its capacity: the highest rate below all rates that miss
# a bound. `max_num_seqs` is the number of sequences that run at the same time, `max_num_batched_tokens` the tokens per
# step. The chart has the best configurations, the defaults and the worst one.

# %%
sweep = servesim.sweep(
    base=BASE, params=KNOBS, rates=RATES, subject_to=BOUNDS, precision=PRECISION, objectives=["mean_e2el_ms"],
    replications=REPLICATIONS, jobs=JOBS,
)  # fmt: skip
capacity, winner = sweep.capacity, sweep.winner
assert winner is not None, sweep.verdict  # no configuration meets the bounds


def name_of(config: int, short: bool = False) -> str:
    """Return the settings of a configuration, as people say them."""
    values = capacity.loc[config, list(KNOBS)]
    if values.isna().any():
        return "those of BASE"
    return ", ".join(f"{value:,g}" + ("" if short else f" {NAMES.get(key, key)}") for key, value in values.items())


worst = capacity.capacity.fillna(0).idxmin()
remarks = {worst: " (worst)", 0: " (defaults)", winner: " (winner)"}
shown = list(dict.fromkeys([winner, *capacity.index[:3], 0, worst]))
draw(
    sweep.curves,
    {config: name_of(config, short=True) + remarks.get(config, "") for config in shown},
    ", ".join(NAMES.get(key, key) for key in KNOBS),
    f"The winner, {name_of(winner)}, takes {capacity.capacity[winner]:.1f} requests per second; "
    f"the worst one, {name_of(worst)}, takes {capacity.capacity[worst]:.1f}.",
)

# %% [markdown]
# Capacities of all configurations, in requests per second:

# %%
columns, rows = KNOBS
grid = capacity.dropna(subset=list(KNOBS)).pivot(index=rows, columns=columns, values="capacity")
grid.rename_axis(index=NAMES.get(rows, rows), columns=NAMES.get(columns, columns)).round(1)

# %% [markdown]
# ## Settings for one rate
# The ranking at the highest rate that the defaults meet, and the winner against the defaults there.

# %%
curve = sweep.curves[(sweep.curves.config == 0) & sweep.curves.rate.isin(RATES)]
rate = curve.rate[curve.meets].max() if curve.meets.any() else RATES[0]
at_rate = sweep.at(rate)
at_rate

# %%
metrics = ["mean_e2el_ms", *LIMITS, "output_throughput"]
changes = at_rate.compare(winner, metrics=metrics).table if winner else None
if changes is not None:
    figure, axes = plt.subplots(figsize=(7, 2.3))
    for outcome, colour in {"better": COLOURS[0], "worse": COLOURS[1], "": COLOURS[-1]}.items():
        of_kind = changes[changes.outcome == outcome if outcome else ~changes.outcome.isin(["better", "worse"])]
        middle, low, high = (100 * of_kind[key].astype(float) for key in ("relative", "relative_low", "relative_high"))
        spread = [(middle - low).fillna(0), (high - middle).fillna(0)]
        places = [metrics.index(metric) for metric in of_kind.index]
        axes.errorbar(middle, places, xerr=spread, fmt="o", color=colour, capsize=3, label=outcome or "no difference")
    axes.axvline(0, color="black", lw=0.8)
    axes.set(xlabel="change against the defaults (%)", yticks=range(len(metrics)), ylim=(len(metrics) - 0.5, -0.5))
    axes.set_yticklabels([metric_title(metric) for metric in metrics])
    figure.legend(loc="outside right upper", title="the winner is")
    plt.show()
    display(Markdown(
        f"At {rate:g} requests per second, {name_of(winner)}: "
        + ", ".join(f"{title_inside(metric)} {100 * changes.relative[metric]:+.1f} %" for metric in metrics[:-1])
        + ". Bars are 95 % confidence intervals."
    ))  # fmt: skip

# %% [markdown]
# ## Answer

# %%
best, base = capacity.loc[winner], capacity.loc[0]
bounds = " and ".join(f"{metric_title(metric)} at most {limit:,.0f} ms" for metric, limit in LIMITS.items())
at_best = sweep.curves[sweep.curves.config == winner].set_index("rate")
near = ", ".join(
    f"{metric_title(metric)} {at_best.loc[rate, metric]:,.0f} ms at {rate:g} req/s and "
    f"{at_best.loc[best.capacity, metric]:,.0f} ms at {best.capacity:.1f} req/s"
    for metric in LIMITS
)
display(Markdown(
    f"**{best.capacity:.1f} requests per second, with {name_of(winner)}** ({bounds}). "
    f"At {best.missed_at:.1f} requests per second, {why_not(best.reason)}.\n\n"
    f"The defaults take {base.capacity:.1f} requests per second "
    f"({100 * (best.capacity / base.capacity - 1):+.0f} % with the winner), "
    f"the worst tested settings, {name_of(worst)}, {capacity.capacity[worst]:.1f}. "
    f"These rates are exact to {100 * PRECISION:g} %.\n\n"
    f"Latencies rise fast near this rate: {near}. So plan with a margin."
))  # fmt: skip
print(sweep.export("vllm", winner, MODEL))

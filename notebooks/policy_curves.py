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
# # Which scheduler settings matter, and does the best value change with the request rate?
# For engineers who tune a scheduler. Six settings of MindSpore llm-serving, each with six or more values, at two
# request rates. The last section has the answer.
#
# Set the parameters in the next cell. Each setting changes alone; all others have the values of `BASE`.

# %% tags=["parameters"]
BASE = {
    "preset": "contest-baseline",  # stock MindSpore llm-serving, as in the 2024 contest
    "profile": "ascend910b4-llama2-7b",
    "workload": {"contest": {"X": 4, "T": 100}},  # 400 requests
    "policy": {"decode_batch": 32, "prefill_batch": 4},
    "engine": {"prefill_buckets": [520], "num_blocks": 160},
}
RATES = [3, 4]  # requests per second
SETTINGS = {  # name of the setting: label of a value, and the keys that it sets
    "Decode batch": {n: {"policy.decode_batch": n} for n in (8, 12, 16, 24, 32, 48, 64)},
    "Prefill batch": {n: {"policy.prefill_batch": n} for n in (1, 2, 3, 4, 6, 8)},
    "KV blocks": {n: {"engine.num_blocks": n} for n in (100, 120, 140, 160, 180, 200, 240)},
    "Delay factor": {factor: {"policy.delay_factor": factor} for factor in (0, 1, 2, 3, 4, 6, 8)},
    "Order": {
        order.replace("-", " "): {"policy.order": order}
        for order in (
            "arrival", "output-groups", "shortest-output", "longest-output", "shortest-prompt", "longest-prompt",
            "shortest-total", "longest-total",
        )
    },
    "Swap priority": {
        f"{victim}, {place}": {"policy.victim": victim, **keys}
        for place, keys in {
            "to the front": {"policy.preempted_to": "front"},
            "by arrival": {"policy.preempted_to": "sorted"},
            "swapped first": {"policy.preempted_to": "swapped", "policy.refill_from": "swapped"},
            "waiting first": {"policy.preempted_to": "swapped", "policy.refill_from": "waiting"},
        }.items()
        for victim in ("shortest", "newest")
    },
}  # fmt: skip
METRICS = ["mean_e2el_ms", "mean_ttft_ms"]  # one panel each; the first is ranked
REPLICATIONS = 8  # runs per value and rate, with different random numbers
CLOSER = "Decode batch"  # the setting that runs at more rates, to find where the winner changes
CLOSER_VALUES = [12, 16, 24, 32]
CLOSER_RATES = [2, 2.5, 2.75, 3, 3.25, 3.5, 3.75, 4, 4.5]
JOBS = None  # processes; None: one per core

# %%
import matplotlib.pyplot as plt
import pandas as pd
import servesim
from IPython.display import Markdown, display
from servesim.runs.metric_table import metric_title, title_inside
from servesim.runs.text import STATE_LABELS
from servesim.statistics.intervals import interval

plt.rcParams.update({
    "figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3, "figure.dpi": 85, "font.size": 9,
    "axes.titlesize": 10,
})  # fmt: skip
COLOURS = ["#0b6e4f", "#b3541e", "#3b5bdb", "#7a5bb5", "#e0a33e"]


def run_setting(values: dict, rates: list[float], replications: int) -> dict[float, pd.DataFrame]:
    """Run all values of a setting at some rates. For each rate, return a table with one row per value, in seconds."""
    params = [{key: [value] for key, value in keys.items()} for keys in values.values()]
    sweep = servesim.sweep(
        base=BASE, params=params, rates=rates, replications=replications, objectives=METRICS[:1], jobs=JOBS
    )
    tables = {}
    for rate in rates:
        found, runs = sweep.at(rate).table, sweep.at(rate).runs.groupby("config")
        for metric in METRICS:
            found[metric] = runs[metric].mean() / 1e3
            found[f"{metric}_interval"] = runs[metric].apply(lambda values: interval(list(values)).half_width) / 1e3
        rows = [(found[list(keys)] == pd.Series(keys)).all(axis=1).idxmax() for keys in values.values()]
        tables[rate] = found.loc[rows].set_index(pd.Index(values, name="value"))
    return tables


def winner(table: pd.DataFrame) -> object:
    """Return the value with the best rank; if nothing beats the value of BASE, that one."""
    return table["rank"].idxmin()


curves = {name: run_setting(values, RATES, REPLICATIONS) for name, values in SETTINGS.items()}
seconds = [table[metric] for tables in curves.values() for table in tables.values() for metric in METRICS]
LIMITS = 0.8 * min(map(min, seconds)), 1.5 * max(map(max, seconds))  # all charts have the same axis
display(Markdown(f"{sum(map(len, SETTINGS.values()))} values, {len(RATES)} rates, {REPLICATIONS} replications each."))

# %% [markdown]
# ## How to read the charts
# All charts have the same axis in seconds, so a flat curve is a setting that does not matter. Bars are 95 % confidence
# intervals of the mean. The star is the winner; filled points are not significantly worse than it (paired differences);
# open points are worse. If nothing beats the value of `BASE`, this value is the winner.


# %%
def draw(name: str) -> None:
    """Draw the curves of one setting, one panel per metric and one colour per rate."""
    numeric = all(isinstance(value, (int, float)) for value in SETTINGS[name])
    labels, size = list(SETTINGS[name]), len(SETTINGS[name])
    places = labels if numeric else list(range(size))
    figure, panels = plt.subplots(1, len(METRICS), figsize=(8.6, 2.7 if numeric else 0.3 * size + 0.9), sharey=True)
    for axes, metric in zip(panels, METRICS):
        for (rate, table), colour in zip(curves[name].items(), COLOURS):
            spread = {"yerr" if numeric else "xerr": table[f"{metric}_interval"]}
            both = (places, table[metric]) if numeric else (table[metric], places)
            axes.errorbar(*both, **spread, color=colour, capsize=2, lw=1, ls="-" if numeric else "none")
            fills = [colour if relation != "worse" else "white" for relation in table.relation]
            axes.scatter(*both, s=26, c=fills, edgecolors=colour, zorder=3)
            star = labels.index(winner(table))
            x, y = (list(side)[star] for side in both)
            axes.scatter(x, y, s=150, marker="*", color=colour, zorder=4, label=f"{rate:g} req/s")
        set_scales(axes, metric, name, places, labels if numeric else None)
    if not numeric:
        panels[0].set_yticks(places, labels)
        panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", title="request rate")
    plt.show()
    display(Markdown(" ".join(describe(name, rate) for rate in RATES)))


def set_scales(axes: plt.Axes, metric: str, name: str, places: list, ticks: list | None) -> None:
    """Set one logarithmic axis of seconds, and the axis of the values."""
    side, other = ("y", "x") if ticks else ("x", "y")
    axes.set(**{f"{side}scale": "log", f"{side}lim": LIMITS, f"{side}label": "seconds"}, title=metric_title(metric))
    shown = [value for value in (0.5, 1, 2, 5, 10, 20, 50, 100) if LIMITS[0] <= value <= LIMITS[1]]
    axes.set(**{f"{side}ticks": shown, f"{side}ticklabels": [f"{value:g}" for value in shown]})
    getattr(axes, f"{side}axis").set_tick_params(which="minor", length=0, labelsize=0)
    if ticks:
        axes.set(**{f"{other}ticks": places, f"{other}label": name})


def describe(name: str, rate: float) -> str:
    """Return the winner, the values that are as good, and the worst value at one rate."""
    table = curves[name][rate]
    seconds, best = table[METRICS[0]], winner(table)
    if not (table.relation == "worse").any():
        return f"At {rate:g} req/s, no value differs significantly from *{best}* ({seconds[best]:.1f} s)."
    tied = [str(value) for value in table.index[table.relation != "worse"] if value != best]
    also = f" (not significantly worse: {'; '.join(tied)})" if tied else ""
    return (
        f"At {rate:g} req/s, *{best}* wins with {seconds[best]:.1f} s{also}. "
        f"The worst is *{seconds.idxmax()}* with {seconds.max():.1f} s."
    )


# %% [markdown]
# ## Decode batch
# The number of slots: at most this many requests run, and the engine pads every decode step to it.

# %%
draw("Decode batch")

# %% [markdown]
# ## Prefill batch
# Prompts per prefill step.

# %%
draw("Prefill batch")

# %% [markdown]
# ## KV blocks
# Size of the KV cache, in blocks of 16 tokens. If it is full, running requests are preempted and start again.

# %%
draw("KV blocks")

# %% [markdown]
# ## Delay factor
# Prompts wait until the oldest has waited this multiple of the last prefill's time, so that more prompts share a step.

# %%
draw("Delay factor")

# %% [markdown]
# ## Order
# Order of the waiting queue, by output, prompt or both. It assumes that the output length is known.

# %%
draw("Order")

# %% [markdown]
# ## Swap priority
# Which request is preempted when no KV block is free (the shortest or the newest), and when it continues: it returns to
# the front of the waiting queue, or to its place by arrival, or it is in a queue of its own (swapped), which comes
# before or after the waiting queue.

# %%
draw("Swap priority")

# %% [markdown]
# ## All settings
# `effect`: the worst value divided by the best one. `gain`: the winner against the value of `BASE`.

# %%
rows = {}
for name, tables in curves.items():
    for rate, table in tables.items():
        seconds, best = table[METRICS[0]], winner(table)
        base = seconds[best] - table.loc[best, f"{METRICS[0]}_difference"] / 1e3
        rows.setdefault(name, {}).update({
            f"winner, {rate:g} req/s": best, f"gain, {rate:g} req/s": f"{1 - seconds[best] / base:.0%}",
            f"effect, {rate:g} req/s": round(seconds.max() / seconds.min(), 1),
        })  # fmt: skip
overview = pd.DataFrame.from_dict(rows, orient="index").sort_values(f"effect, {RATES[-1]:g} req/s", ascending=False)
overview

# %% [markdown]
# ## Where the winner changes
# One setting at more rates. The bars are 95 % confidence intervals of the mean.

# %%
closer = run_setting({value: SETTINGS[CLOSER][value] for value in CLOSER_VALUES}, CLOSER_RATES, REPLICATIONS // 2)
figure, axes = plt.subplots(figsize=(7, 3))
for value, colour in zip(CLOSER_VALUES, COLOURS):
    means = [closer[rate].loc[value, METRICS[0]] for rate in CLOSER_RATES]
    spread = [closer[rate].loc[value, f"{METRICS[0]}_interval"] for rate in CLOSER_RATES]
    axes.errorbar(CLOSER_RATES, means, spread, color=colour, marker="o", ms=4, lw=1.3, capsize=2, label=f"{value}")
axes.set(xlabel="request rate (req/s)", ylabel=f"{metric_title(METRICS[0])} (s)", ylim=(0, None))
figure.legend(loc="outside right upper", title=CLOSER)
plt.show()
winners = pd.Series({rate: winner(table) for rate, table in closer.items()})
spans = [part for _, part in winners.groupby(winners.ne(winners.shift()).cumsum())]
where = ", then ".join(f"{part.iloc[0]} from {part.index[0]:g} to {part.index[-1]:g} req/s" for part in spans)
display(Markdown(f"Best {CLOSER.lower()} by {title_inside(METRICS[0])}: {where}."))

# %% [markdown]
# ## Why
# Mean time of a request in each state at the higher rate. With few slots, requests wait in the queue. With many slots,
# each decode step takes longer and the KV cache is full: preempted requests start again, and the others wait for them.

# %%
states = {}
for value, keys in SETTINGS[CLOSER].items():
    run = servesim.run(BASE, settings={**keys, "workload.contest.X": RATES[-1]})
    states[value] = run.time_breakdown
breakdown = pd.DataFrame(states).T.rename(columns=STATE_LABELS)
breakdown = breakdown.loc[:, breakdown.max() > 0.01]
axes = breakdown.plot.barh(stacked=True, figsize=(7, 2.8), colormap="tab10", legend=False)
axes.set(xlabel="mean seconds per request", ylabel=CLOSER)
axes.invert_yaxis()
axes.figure.legend(loc="outside right upper")
plt.show()
largest = breakdown.idxmax(axis=1)
display(Markdown("Largest part: " + "; ".join(f"{value}: {state}" for value, state in largest.items()) + "."))

# %% [markdown]
# ## Answer

# %%
low, high = RATES[0], RATES[-1]
effect = overview[f"effect, {high:g} req/s"]
costs = {}  # of the winner at the low rate, when it is used at the high rate
for name, tables in curves.items():
    seconds = tables[high][METRICS[0]]
    costs[name] = seconds[winner(tables[low])] / seconds[winner(tables[high])] - 1
moved = [
    f"{name} ({winner(curves[name][low])} at {low:g} req/s, {winner(curves[name][high])} at {high:g} req/s; "
    f"the first one costs {cost:.0%} at {high:g} req/s)"
    for name, cost in costs.items() if cost >= 0.05
]  # fmt: skip
display(Markdown(
    f"**{effect.index[0]} and {effect.index[1]} matter most**: the {title_inside(METRICS[0])} of the worst value is "
    f"{effect.iloc[0]:.1f} and {effect.iloc[1]:.1f} times that of the best at {high:g} req/s. {effect.index[-1]} "
    f"matters least ({effect.iloc[-1]:.1f} times).\n\n"
    f"**The winner changes with the rate** for {'; '.join(moved) or 'no setting'}. Best {CLOSER.lower()}: {where}. "
    f"The other settings keep their winner, or lose less than 5 % with it.\n\n"
    f"Tune {effect.index[0].lower()} first, at the highest rate that you expect."
))  # fmt: skip

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
# # Policy curves
# A sweep of scheduling knobs, turned into curves: what each knob does to makespan, latency and goodput, what can be
# traded for what, and what the winner changed for whom.
#
# The next cell is all there is to set. Give the folder of a finished `sim sweep` to look at that one instead.

# %% tags=["parameters"]
SWEEP = ""  # folder of a finished sweep; empty: the one below is run
BASE = {
    "preset": "contest-baseline",  # llm-serving as it was handed out in its contest
    "profile": "ascend910b4-llama2-7b",
    "workload": {"contest": {"X": 4, "T": 375}},  # 1,500 requests
    "policy": {"decode_batch": 16, "delay_variant": "queue"},
    "engine": {"prefill_gears": [520], "num_blocks": 200},
    "slo": {"ttft": 10_000, "tpot": 200},  # milliseconds: what goodput counts
}
KNOBS = {
    "policy.decode_batch": [16, 32, 64],
    "policy.prefill_batch": [1, 4],
    "policy.delay_factor": [0, 8],
    "policy.order": ["arrival", "longest-output"],
    "policy.evicted": ["front", "swapped"],  # back to the head of waiting, or to a queue of their own
    "policy.victim": ["shortest", "newest"],
    "engine.num_blocks": [160, 200],
}
REPLICATIONS = 3
JOBS = None  # processes; None: one a core
METRICS = {  # the first decides who wins
    "mean_e2el_ms": "mean end-to-end latency (ms)",
    "mean_ttft_ms": "mean TTFT (ms)",
    "mean_tpot_ms": "mean TPOT (ms)",
    "request_goodput": "goodput (requests/s)",
    "makespan": "makespan (s)",
}

# %%
import matplotlib.pyplot as plt
import pandas as pd
import servesim
from IPython.display import Markdown, display

plt.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3})
if SWEEP:
    found = servesim.load(SWEEP)
else:
    found = servesim.sweep(
        base=BASE, params=KNOBS, replications=REPLICATIONS, objectives=list(METRICS), jobs=JOBS, progress=True
    )
print(found)

# %% [markdown]
# ## The best and the baseline
# A row a configuration, the best first; `_diff` is the paired difference to the baseline, `_half` the half-width of its
# confidence interval.

# %%
first, *others = METRICS
columns = ["rank", "labels", *found.knobs, first, f"{first}_diff", f"{first}_diff_half", *others]
found.table.loc[list(dict.fromkeys([*found.table.index[:5], 0])), columns].T

# %% [markdown]
# ## What each knob does
# Blue: the best that is reached with each value when all other knobs are free. Green: the winner with this one knob
# changed. A bar that reaches the winner's level cannot be told from it (it is the interval of the paired difference).
# Where blue is flat, other knobs make up for this one.


# %%
def draw(knob: str) -> None:
    """Draw one knob: a panel for each figure."""
    _, panels = plt.subplots(1, len(METRICS), figsize=(2.9 * len(METRICS), 2.8))
    for axes, (metric, label) in zip(panels, METRICS.items()):
        curve = found.curve(knob, metric)
        places = range(len(curve))
        axes.errorbar(places, curve.best, curve.best_half, marker="o", color="#3b5bdb", capsize=3, label="best with it")
        axes.errorbar(
            places, curve.alone, curve.alone_half, marker="s", ms=4, color="#0b6e4f", capsize=3, label="alone"
        )
        axes.set_xticks(places, [str(value) for value in curve.index])
        axes.set(xlabel=knob, ylabel=label)
    panels[0].legend(fontsize="small")
    plt.show()
    display(Markdown(" ".join(found.sentence(knob, metric) for metric in METRICS)))


# %%
draw(found.knobs[0])

# %%
draw(found.knobs[1])

# %%
for knob in found.knobs[2:]:
    draw(knob)

# %% [markdown]
# ## What can be traded for what
# Every configuration by the mean time to its whole answers and to their first token. Those on the front are beaten by
# no other in every objective at once; the rest are never worth having.

# %%
table = found.table[found.table.eligible]
figure, axes = plt.subplots(figsize=(6.4, 4))
shown = {
    "configurations": (table, {"s": 14, "color": "#9aa1ab"}),
    "Pareto front": (found.pareto, {"s": 26, "color": "#3b5bdb"}),
    "baseline": (table[table.index == 0], {"s": 60, "marker": "X", "color": "#b3541e"}),
    "winner": (table.loc[[found.winner]], {"s": 90, "marker": "*", "color": "#0b6e4f"}),
}
for name, (rows, how) in shown.items():
    axes.scatter(rows.mean_e2el_ms / 1e3, rows.mean_ttft_ms / 1e3, label=name, **how)
axes.set(xlabel="mean end-to-end latency (s)", ylabel="mean TTFT (s)", yscale="log")
axes.legend(fontsize="small")
plt.show()
display(Markdown(f"{len(found.pareto)} of {len(found.table)} configurations are on the front of all objectives."))

# %% [markdown]
# ## What the winner changed for whom
# The same requests under winner and baseline, one dot each: below zero, a request is answered sooner.

# %%
winner, baseline = found.run(turns=True), found.run(0, turns=True)
changed = winner.against(baseline)
figure, axes = plt.subplots(figsize=(6.4, 3.6))
dots = axes.scatter(changed.arrival, changed.e2el, s=8, c=changed.output, cmap="viridis")
axes.axhline(0, color="grey", linewidth=0.8)
axes.set(xlabel="arrival (s)", ylabel="change of end-to-end latency (s)")
figure.colorbar(dots, label="answer (tokens)")
plt.show()
display(Markdown(
    f"{(changed.e2el < 0).mean():.0%} of the requests are answered sooner; the median change is "
    f"{changed.e2el.median():+.1f} s, and long answers (the longest quarter) change by "
    f"{changed.e2el[changed.output >= changed.output.quantile(0.75)].median():+.1f} s."
))  # fmt: skip

# %% [markdown]
# ## Where the time went

# %%
where = pd.DataFrame({"baseline": baseline.where, "winner": winner.where}).T
axes = where.plot.barh(stacked=True, figsize=(7.5, 2.4), colormap="tab10", legend=False)
axes.set(xlabel="seconds of a request, mean")
axes.figure.legend(loc="outside upper center", ncols=6, fontsize="small")
plt.show()
most = (where.loc["winner"] - where.loc["baseline"]).abs().idxmax()
display(Markdown(
    f"The largest part of the change is *{most}*: {where[most]['baseline']:.1f} s under the baseline, "
    f"{where[most]['winner']:.1f} s under the winner."
))  # fmt: skip

# %% [markdown]
# ## The queues over time

# %%
_, panels = plt.subplots(2, 1, figsize=(7.5, 4), sharex=True)
for axes, (name, run) in zip(panels, {"baseline": baseline, "winner": winner}.items()):
    for queue, colour in {"waiting": "#e0a33e", "running": "#0b8f6a", "swapped": "#7a5bb5"}.items():
        axes.step(run.turns.t, run.turns[queue], where="post", color=colour, label=queue)
    axes.set(ylabel="requests", title=name)
panels[0].legend(fontsize="small")
panels[1].set(xlabel="time (s)")
plt.show()
display(Markdown(
    f"At most {baseline.turns.waiting.max()} requests wait under the baseline, {winner.turns.waiting.max()} under the "
    f"winner; {baseline.figures['evictions']} and {winner.figures['evictions']} evictions."
))  # fmt: skip

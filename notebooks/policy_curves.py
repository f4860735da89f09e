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
# Use this notebook to understand a sweep. It shows the effect of each parameter on makespan, latency and goodput, the
# trade-offs, and how winner and baseline differ for each request.
#
# Set the parameters in the next cell. To load a finished `sim sweep`, set `SWEEP` to its folder.

# %% tags=["parameters"]
SWEEP = ""  # folder of a finished sweep; empty: run the sweep below
BASE = {
    "preset": "contest-baseline",  # stock MindSpore llm-serving, as in the 2024 contest
    "profile": "ascend910b4-llama2-7b",
    "workload": {"contest": {"X": 4, "T": 200}},  # 4 requests/s for 200 s: 800 requests
    "policy": {"decode_batch": 16, "delay_variant": "queue"},
    "engine": {"prefill_buckets": [520], "num_blocks": 200},
    "slo": {"ttft": 10_000, "tpot": 200},  # milliseconds, the bounds of goodput
}
KNOBS = {  # parameters and their values; the sweep runs all combinations
    "policy.decode_batch": [16, 32, 64],
    "policy.prefill_batch": [1, 4],
    "policy.order": ["arrival", "longest-output"],
    "policy.preempted_to": ["front", "swapped"],  # head of the waiting queue, or the swapped queue
    "engine.num_blocks": [160, 200],
}
REPLICATIONS = 8  # runs per configuration, with different random numbers
JOBS = None  # processes; None: one per core
METRICS = ["mean_e2el_ms", "mean_ttft_ms", "mean_tpot_ms", "request_goodput", "makespan"]  # the first is ranked

# %%
import matplotlib.pyplot as plt
import pandas as pd
import servesim
from IPython.display import Markdown, display

plt.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3, "figure.dpi": 80})
if SWEEP:
    sweep = servesim.load(SWEEP)
else:
    sweep = servesim.sweep(base=BASE, params=KNOBS, replications=REPLICATIONS, objectives=METRICS, jobs=JOBS)
sweep

# %% [markdown]
# ## Winner and baseline
# B is the winner, A is the baseline. Every replication gives a pair of runs with the same random numbers. `sweep.table`
# has these differences for all configurations.

# %%
sweep.compare(metrics=METRICS)

# %% [markdown]
# ## Two parameters at once
# The metric that selects the winner, for the two parameters that change it most. The other parameters have the winner's
# values.

# %%
sweep.knob_table().round(0)

# %% [markdown]
# ## Effect of each parameter
# Blue: the best configuration with each value; all other parameters may change. Green: the winner with only this
# parameter changed. Error bars: confidence interval of the paired difference to the winner. If a bar reaches the
# winner's level, the difference is not significant. If the blue curve is flat, other parameters can compensate for
# this one.


# %%
def draw(knob: str) -> None:
    """Draw the curves of one parameter, one panel per metric."""
    _, panels = plt.subplots(1, len(METRICS), figsize=(2.9 * len(METRICS), 2.8))
    for axes, metric in zip(panels, METRICS):
        sweep.plot(knob, metric, axes)
        axes.get_legend().set_visible(axes is panels[0])
    plt.show()
    display(Markdown(" ".join(sweep.describe_curve(knob, metric) for metric in METRICS)))


# %%
draw(sweep.knobs[0])

# %%
draw(sweep.knobs[1])

# %%
for knob in sweep.knobs[2:]:
    draw(knob)

# %% [markdown]
# ## Trade-offs
# One dot per configuration: mean end-to-end latency and mean TTFT, with the Pareto front of these two. `sweep.pareto`
# is the front of all objectives: no other configuration is better in one and at least as good in all others.

# %%
sweep.plot_trade_off("mean_e2el_ms", "mean_ttft_ms")
plt.show()
text = f"{len(sweep.pareto)} of {len(sweep.table)} configurations are on the Pareto front of all objectives."
display(Markdown(text))

# %% [markdown]
# ## Winner and baseline: difference of each request
# One dot per request that finished in both runs. Below zero, its latency is lower with the winner.

# %%
winner, baseline = sweep.run(decisions=True), sweep.run(0, decisions=True)
changed = winner.diff(baseline)
figure, axes = plt.subplots(figsize=(6.4, 3.6))
dots = axes.scatter(changed.arrival, changed.e2el, s=8, c=changed.output, cmap="viridis")
axes.axhline(0, color="grey", linewidth=0.8)
axes.set(xlabel="arrival (s)", ylabel="change of end-to-end latency (s)")
figure.colorbar(dots, label="output (tokens)")
plt.show()
display(Markdown(
    f"{(changed.e2el < 0).mean():.0%} of the requests have a lower latency. The median change is "
    f"{changed.e2el.median():+.1f} s; for the quarter with the longest outputs it is "
    f"{changed.e2el[changed.output >= changed.output.quantile(0.75)].median():+.1f} s."
))  # fmt: skip

# %% [markdown]
# ## Time breakdown
# Mean seconds per finished request in each state. A running request is `stalled` while a step runs without it.

# %%
breakdown = pd.DataFrame({"baseline": baseline.time_breakdown, "winner": winner.time_breakdown}).T
axes = breakdown.plot.barh(stacked=True, figsize=(7.5, 2.4), colormap="tab10", legend=False)
axes.set(xlabel="mean seconds per request")
axes.figure.legend(loc="outside upper center", ncols=6, fontsize="small")
plt.show()
state = (breakdown.loc["winner"] - breakdown.loc["baseline"]).abs().idxmax()
display(Markdown(
    f"The largest change is in *{state}*: {breakdown[state]['baseline']:.1f} s with the baseline, "
    f"{breakdown[state]['winner']:.1f} s with the winner."
))  # fmt: skip

# %% [markdown]
# ## Queues over time
# Number of requests in each queue.

# %%
_, panels = plt.subplots(2, 1, figsize=(7.5, 4), sharex=True)
for axes, (name, run) in zip(panels, {"baseline": baseline, "winner": winner}.items()):
    for queue, colour in {"waiting": "#e0a33e", "running": "#0b8f6a", "swapped": "#7a5bb5"}.items():
        axes.step(run.decisions.t, run.decisions[queue], where="post", color=colour, label=queue)
    axes.set(ylabel="requests", title=name)
panels[0].legend(fontsize="small")
panels[1].set(xlabel="time (s)")
plt.show()
display(Markdown(
    f"At most {baseline.decisions.waiting.max()} requests wait with the baseline, and "
    f"{winner.decisions.waiting.max()} with the winner. The baseline has {baseline.metrics['preemptions']} "
    f"preemptions, the winner {winner.metrics['preemptions']}."
))  # fmt: skip

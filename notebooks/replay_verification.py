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
# # Replay verification
# Use this notebook to compare a simulation with a run on a device or server, and to find the source of the error.
# It compares metrics, requests and steps.
#
# Set the parameters in the next cell. `REPLAY` is a folder of `sim replay -o`. If it is empty, the notebook replays
# `SCENARIO` on the fake backend, which sleeps for the step times of `DEVICE`. The simulation uses `PROFILE`.

# %% tags=["parameters"]
REPLAY = ""  # folder of `sim replay -o`
SETTING = ""  # name of the configuration, if the folder has several, e.g. rank1; empty: the first
SCENARIO = {
    "workload": {"contest": {"X": 25, "T": 12}},
    "policy": {"name": "vllm"},
    "engine": {"num_blocks": 120, "block_size": 16},
}
SLOTS = [8, 16]  # max_num_seqs, one replay per value
PROFILE = {"kind": "linear", "prefill": 0.004, "prefill_token": 4e-5, "decode_step": 0.004, "decode_live": 1e-4}
DEVICE = {**PROFILE, "decode_step": 0.0043, "context": 2e-7}  # slower than PROFILE; the gap grows with context

# %%
import matplotlib.pyplot as plt
import pandas as pd
import servesim
from IPython.display import Markdown, display

plt.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3, "figure.dpi": 80})
COLOURS = {"prefill": "#3b5bdb", "decode": "#0b6e4f", "mixed": "#e0a33e", "swap": "#7a5bb5"}
SIDES = {"simulated": "#3b5bdb", "measured": "#b3541e"}
if REPLAY:
    loaded = servesim.load(REPLAY)
    replays = loaded if isinstance(loaded, dict) else {loaded.name: loaded}
else:
    scenarios = {f"{n} slots": {**SCENARIO, "policy": {**SCENARIO["policy"], "max_num_seqs": n}} for n in SLOTS}
    replays = {
        name: servesim.replay(scenario, backend="fake", profile=PROFILE, device=DEVICE)
        for name, scenario in scenarios.items()
    }
replay = replays[SETTING or next(iter(replays))]
replay

# %% [markdown]
# ## Error of each metric
# The error (dot) has two parts (bars). `from_step_times` disappears if the simulation uses the measured step times.
# `from_decisions` is the rest: the two runs made different decisions.

# %%
metrics = ["makespan", "output_throughput", *(f"{k}_{m}_ms" for m in ("ttft", "tpot", "e2el") for k in ("mean", "p99"))]
errors = 100 * replay.errors.loc[metrics, ["from_step_times", "from_decisions"]]
axes = errors.plot.barh(stacked=True, figsize=(7.5, 3.4), color=["#e0a33e", "#7a5bb5"])
axes.scatter(100 * replay.errors.error[metrics], range(len(metrics)), color="black", zorder=3, s=18, label="error")
axes.axvline(0, color="grey", linewidth=0.8)
axes.invert_yaxis()
axes.set(xlabel="simulated - measured (%)", ylabel="")
axes.legend(fontsize="small")
plt.show()
worst = replay.errors.error[metrics].abs().idxmax()
display(Markdown(
    f"The error of the makespan is {replay.errors.error['makespan']:+.2%}. The largest error is "
    f"{replay.errors.error[worst]:+.2%} ({worst}); {replay.errors.from_step_times[worst]:+.2%} comes from step times."
))  # fmt: skip

# %% [markdown]
# ## Simulated and measured latency of each request
# One dot per request. On the grey line, simulated and measured latency are equal.

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 3.8))
for axes, name in zip(panels, ("ttft", "e2el")):
    measured, simulated = replay.requests[f"{name}_measured"], replay.requests[f"{name}_simulated"]
    axes.scatter(measured, simulated, s=9, color="#3b5bdb", alpha=0.6)
    axes.axline((0, 0), slope=1, color="grey", linewidth=0.8)
    axes.set(xlabel=f"measured {name} (s)", ylabel=f"simulated {name} (s)")
plt.show()
error = (replay.requests.e2el_simulated / replay.requests.e2el_measured - 1).abs()
display(Markdown(
    f"For {(error <= 0.05).mean():.0%} of {len(error)} requests, the error of the end-to-end latency is within 5 %."
))  # fmt: skip

# %% [markdown]
# ## Error of each request over time
# While a queue grows, small errors of step times add up.

# %%
difference = 1e3 * (replay.requests.e2el_simulated - replay.requests.e2el_measured)
figure, axes = plt.subplots(figsize=(7.5, 3))
dots = axes.scatter(replay.requests.arrival, difference, s=9, c=replay.requests.output, cmap="viridis")
axes.axhline(0, color="grey", linewidth=0.8)
axes.set(xlabel="arrival (s)", ylabel="e2el: simulated - measured (ms)")
figure.colorbar(dots, label="output (tokens)")
plt.show()
half = len(difference) // 2
display(Markdown(
    f"The mean error is {difference.iloc[:half].mean():+.1f} ms in the first half of the requests and "
    f"{difference.iloc[half:].mean():+.1f} ms in the second half."
))  # fmt: skip

# %% [markdown]
# ## Measured and predicted time of each step
# One dot per model call: the measured time, and the time that the profile predicts for its step shape.

# %%
figure, axes = plt.subplots(figsize=(6, 4))
for kind, steps in replay.steps.groupby("kind"):
    axes.scatter(1e3 * steps.seconds, 1e3 * steps.predicted, s=9, alpha=0.5, color=COLOURS[kind], label=kind)
axes.axline((0, 0), slope=1, color="grey", linewidth=0.8)
axes.set(xlabel="measured step time (ms)", ylabel="predicted step time (ms)")
axes.legend(fontsize="small")
plt.show()
kinds = replay.steps.groupby("kind")[["seconds", "predicted"]].sum()
errors = ", ".join(f"{kind} {row.predicted / row.seconds - 1:+.2%}" for kind, row in kinds.iterrows())
display(Markdown(f"Error of the total step time, by kind of step: {errors}."))

# %% [markdown]
# ## Accumulated error of the step times
# Sum of predicted - measured over all steps so far. A straight line means that a cost is wrong for all steps. A bend
# means that the error changes there, because the step shapes change.

# %%
replay.steps["difference"] = replay.steps.predicted - replay.steps.seconds
figure, axes = plt.subplots(figsize=(7.5, 3))
for kind, steps in replay.steps.groupby("kind"):
    axes.step(steps.end, 1e3 * steps.difference.cumsum(), where="post", color=COLOURS[kind], label=kind)
axes.step(replay.steps.end, 1e3 * replay.steps.difference.cumsum(), where="post", color="black", lw=1, label="all")
axes.axhline(0, color="grey", linewidth=0.8)
axes.set(xlabel="time (s)", ylabel="sum of predicted - measured (ms)")
axes.legend(fontsize="small", ncols=3)
plt.show()
sums = 1e3 * replay.steps.groupby("kind").difference.sum()
display(Markdown(
    f"The errors of all step times add up to {sums.sum():+.0f} ms; the makespan is "
    f"{1e3 * replay.measured.metrics['makespan']:.0f} ms. The largest sum is that of "
    f"{sums.abs().idxmax()} steps ({sums[sums.abs().idxmax()]:+.0f} ms)."
))  # fmt: skip

# %% [markdown]
# ## Error of single steps by step shape
# One dot per step. If the error changes with the tokens, a term of the cost model is wrong.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
decodes, prompts = replay.steps[replay.steps.kind == "decode"], replay.steps[replay.steps.prefill_rows > 0]
left.scatter(decodes.context, 100 * decodes.difference / decodes.seconds, s=7, alpha=0.5, color=COLOURS["decode"])
left.set(xlabel="cached tokens that the decode step reads", ylabel="predicted - measured (%)")
relative = 100 * prompts.difference / prompts.seconds
right.scatter(prompts.prefill_tokens, relative, s=7, alpha=0.5, color=COLOURS["prefill"])
right.set(xlabel="prompt tokens of the step")
plt.show()
correlation = decodes.context.corr(decodes.difference / decodes.seconds)
display(Markdown(f"Correlation between the error of decode steps and their context: {correlation:+.2f}."))

# %% [markdown]
# ## Queues, simulated and measured
# Number of requests that wait or are swapped out.

# %%
figure, axes = plt.subplots(figsize=(7.5, 2.8))
for side, colour in SIDES.items():
    log = getattr(replay, side).decisions
    if log is not None:
        axes.step(log.t, log.waiting + log.swapped, where="post", color=colour, lw=1, label=side)
axes.set(xlabel="time (s)", ylabel="waiting or swapped requests")
axes.legend(fontsize="small")
plt.show()
compared = replay.comparison.decisions
text = "One of the two runs has no decision log." if compared is None else (
    f"The decisions of the first {compared.same} of {compared.measured} steps are equal. In total, "
    f"{compared.alike} steps have the same decision at the same step number."
)  # fmt: skip
display(Markdown(text))

# %% [markdown]
# ## Ranking of the configurations
# The configuration that is best in the simulation should also be best on the device.

# %%
sides = ("simulated", "measured")
table = pd.DataFrame({name: run.errors.loc["makespan", list(sides)] for name, run in replays.items()}).T
figure, axes = plt.subplots(figsize=(6, 0.4 * len(table) + 1.2))
for side, colour in SIDES.items():
    axes.scatter(table[side], table.index, color=colour, marker="o" if side == "simulated" else "|", s=60, label=side)
axes.set(xlabel="makespan (s)")
axes.legend(fontsize="small")
plt.show()
same = list(table.simulated.sort_values().index) == list(table.measured.sort_values().index)
text = "nothing to rank" if len(table) == 1 else "same ranking" if same else "the ranking differs"
display(Markdown(f"{len(table)} configuration{'s' * (len(table) > 1)}: {text}."))

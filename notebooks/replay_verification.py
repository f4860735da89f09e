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
# # How far is the simulation from a real run, and why?
# For engineers who replayed a scenario on a device or server. The notebook compares metrics, requests and steps, and
# finds the source of the error. The last section has the answer.
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
from servesim.runs.metric_table import LATENCY_TITLES, metric_title, title_inside

plt.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3, "figure.dpi": 75})
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
# The error (dot) has two parts (bars). The part from step times disappears if the simulation uses the measured step
# times. The part from decisions is the rest: the two runs made different decisions.

# %%
metrics = ["makespan", "output_throughput", *(f"{k}_{m}_ms" for m in ("ttft", "tpot", "e2el") for k in ("mean", "p99"))]
errors = 100 * replay.errors.loc[metrics, ["from_step_times", "from_decisions"]]
errors = errors.set_axis(["from step times", "from decisions"], axis=1).set_axis(map(metric_title, metrics))
axes = errors.plot.barh(stacked=True, figsize=(8, 3.2), color=["#e0a33e", "#7a5bb5"], legend=False)
axes.scatter(100 * replay.errors.error[metrics], range(len(metrics)), color="black", zorder=3, s=18, label="error")
axes.axvline(0, color="grey", linewidth=0.8)
axes.invert_yaxis()
axes.use_sticky_edges = False
axes.margins(x=0.05)
axes.set(xlabel="simulated - measured (%)", ylabel="")
axes.figure.legend(loc="outside right upper")
plt.show()
worst = replay.errors.error[metrics].abs().idxmax()
display(Markdown(
    f"The error of the makespan is {replay.errors.error['makespan']:+.2%}. The largest error is "
    f"{replay.errors.error[worst]:+.2%} ({title_inside(worst)}); {replay.errors.from_step_times[worst]:+.2%} comes "
    "from step times."
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
    axes.set(xlabel="measured (s)", ylabel="simulated (s)", title=LATENCY_TITLES[name])
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
axes.set(xlabel="arrival (s)", ylabel="simulated - measured (ms)", title=LATENCY_TITLES["e2el"])
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
middle = 1e3 * replay.steps.seconds.median()
axes.axline((middle, middle), slope=1, color="grey", linewidth=0.8)
axes.set(xlabel="measured step time (ms)", ylabel="predicted step time (ms)")
figure.legend(loc="outside right upper")
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
axes.step(
    replay.steps.end, 1e3 * replay.steps.difference.cumsum(), where="post", color="black", lw=1, ls="--", label="all"
)
axes.axhline(0, color="grey", linewidth=0.8)
axes.set(xlabel="time (s)", ylabel="sum of predicted - measured (ms)")
figure.legend(loc="outside right upper")
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
figure.legend(loc="outside right upper")
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
axes.set(xlabel="Makespan (s)")
axes.margins(y=0.4)
figure.legend(loc="outside right upper")
plt.show()
same = list(table.simulated.sort_values().index) == list(table.measured.sort_values().index)
text = "nothing to rank" if len(table) == 1 else "same ranking" if same else "the ranking differs"
display(Markdown(f"{len(table)} configuration{'s' * (len(table) > 1)}: {text}."))

# %% [markdown]
# ## Answer

# %%
error, source = replay.errors.error["makespan"], replay.errors.from_step_times["makespan"]
part = "step times" if abs(source) >= abs(error - source) else "decisions"
steps = kinds.predicted / kinds.seconds - 1
kind = sums.abs().idxmax()
display(Markdown(
    f"The simulated makespan of {replay.name} differs by **{error:+.1%}**. Most of it comes from **{part}** "
    f"({source:+.1%} from step times, {error - source:+.1%} from decisions). The predicted time of all {kind} steps "
    f"differs by {steps[kind]:+.1%}; the correlation of the error with the context is {correlation:+.2f}"
    + (": it grows with the cached tokens, so check this cost of the profile first." if correlation < -0.5 else ".")
    + f" Ranking of the configurations: {text}."
))  # fmt: skip

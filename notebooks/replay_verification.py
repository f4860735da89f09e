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
# Simulated against measured: figure by figure, request by request, step by step, and where the error comes from.
#
# The next cell is all there is to set. With a folder that `sim replay -o` wrote, it is looked at; without, replays are
# made on a fake device, which takes real time but the seconds that `DEVICE` says instead of those of `PROFILE`.

# %% tags=["parameters"]
REPLAY = ""  # folder of `sim replay -o`
SETTING = ""  # which of its settings, if there are several; empty: the first
SCENARIO = {
    "workload": {"contest": {"X": 25, "T": 12}},
    "policy": {"name": "vllm"},
    "engine": {"num_blocks": 120, "block_size": 16},
}
SLOTS = [8, 16]  # max_num_seqs, a replay each
PROFILE = {"kind": "linear", "prefill": 0.004, "prefill_token": 4e-5, "decode_step": 0.004, "decode_live": 1e-4}
DEVICE = {**PROFILE, "decode_step": 0.0043, "context": 2e-7}  # slower than the profile, the more the longer the context

# %%
import matplotlib.pyplot as plt
import pandas as pd
import servesim
from IPython.display import Markdown, display

plt.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3})
COLOURS = {"prefill": "#3b5bdb", "decode": "#0b6e4f", "mixed": "#e0a33e", "swap": "#7a5bb5"}
SIDES = {"simulated": "#3b5bdb", "measured": "#b3541e"}
if REPLAY:
    loaded = servesim.load(REPLAY)
    several = loaded if isinstance(loaded, dict) else {loaded.name: loaded}
else:
    scenarios = {f"{n} slots": {**SCENARIO, "policy": {**SCENARIO["policy"], "max_num_seqs": n}} for n in SLOTS}
    several = {
        name: servesim.replay(one, backend="fake", profile=PROFILE, device=DEVICE) for name, one in scenarios.items()
    }
replay = several[SETTING or next(iter(several))]
print(replay)

# %% [markdown]
# ## Figure by figure
# The error of each figure, and its two parts: what goes away when the simulation runs with the measured step times, and
# what is left because something else was decided.

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
    f"The makespan is off by {replay.errors.error['makespan']:+.2%}; the worst of these is {worst}, off by "
    f"{replay.errors.error[worst]:+.2%}, of which {replay.errors.from_step_times[worst]:+.2%} comes from step times."
))  # fmt: skip

# %% [markdown]
# ## Request by request
# On the line, both sides agree.

# %%
figure, panels = plt.subplots(1, 2, figsize=(9, 3.8))
for axes, name in zip(panels, ("ttft", "e2el")):
    measured, simulated = replay.requests[f"{name}_measured"], replay.requests[f"{name}_simulated"]
    axes.scatter(measured, simulated, s=9, color="#3b5bdb", alpha=0.6)
    axes.axline((0, 0), slope=1, color="grey", linewidth=0.8)
    axes.set(xlabel=f"measured {name} (s)", ylabel=f"simulated {name} (s)")
plt.show()
off = (replay.requests.e2el_simulated / replay.requests.e2el_measured - 1).abs()
display(Markdown(f"The end-to-end latency of {(off <= 0.05).mean():.0%} of {len(off)} requests is within 5 %."))

# %% [markdown]
# ## Who is off, and when
# The error of each request over the time it came. Where a queue builds up, small errors of steps add up in it.

# %%
late = 1e3 * (replay.requests.e2el_simulated - replay.requests.e2el_measured)
figure, axes = plt.subplots(figsize=(7.5, 3))
dots = axes.scatter(replay.requests.arrival, late, s=9, c=replay.requests.output, cmap="viridis")
axes.axhline(0, color="grey", linewidth=0.8)
axes.set(xlabel="arrival (s)", ylabel="e2el: simulated - measured (ms)")
figure.colorbar(dots, label="answer (tokens)")
plt.show()
half = len(late) // 2
display(Markdown(
    f"The first half of the requests is off by {late.iloc[:half].mean():+.1f} ms on average, the second half by "
    f"{late.iloc[half:].mean():+.1f} ms."
))  # fmt: skip

# %% [markdown]
# ## Step by step
# Every model call: how long it took, and how long the profile says that such a step takes.

# %%
figure, axes = plt.subplots(figsize=(6, 4))
for kind, steps in replay.steps.groupby("kind"):
    axes.scatter(1e3 * steps.seconds, 1e3 * steps.predicted, s=9, alpha=0.5, color=COLOURS[kind], label=kind)
axes.axline((0, 0), slope=1, color="grey", linewidth=0.8)
axes.set(xlabel="measured step (ms)", ylabel="step as the profile has it (ms)")
axes.legend(fontsize="small")
plt.show()
kinds = replay.steps.groupby("kind")[["seconds", "predicted"]].sum()
told = ", ".join(f"{kind} {row.predicted / row.seconds - 1:+.2%}" for kind, row in kinds.iterrows())
display(Markdown(f"Over all steps of a kind the profile is off by: {told}."))

# %% [markdown]
# ## Where the error comes from
# Predicted less measured time of all steps so far. A straight line is a cost that is off everywhere; a bend is a shape
# of step that the profile does not know.

# %%
replay.steps["off"] = replay.steps.predicted - replay.steps.seconds
figure, axes = plt.subplots(figsize=(7.5, 3))
for kind, steps in replay.steps.groupby("kind"):
    axes.step(steps.end, 1e3 * steps.off.cumsum(), where="post", color=COLOURS[kind], label=kind)
axes.step(replay.steps.end, 1e3 * replay.steps.off.cumsum(), where="post", color="black", lw=1, label="all")
axes.axhline(0, color="grey", linewidth=0.8)
axes.set(xlabel="time (s)", ylabel="sum of predicted - measured (ms)")
axes.legend(fontsize="small", ncols=3)
plt.show()
parts = 1e3 * replay.steps.groupby("kind").off.sum()
display(Markdown(
    f"Steps alone account for {parts.sum():+.0f} ms of {1e3 * replay.measured.figures['makespan']:.0f} ms; most of it "
    f"is {parts.abs().idxmax()} ({parts[parts.abs().idxmax()]:+.0f} ms)."
))  # fmt: skip

# %% [markdown]
# ## What kind of step is off
# The error of single steps over their shape: a slope is a term of the cost model that is off.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True)
decodes, prompts = replay.steps[replay.steps.kind == "decode"], replay.steps[replay.steps.prefill_rows > 0]
left.scatter(decodes.context, 100 * decodes.off / decodes.seconds, s=7, alpha=0.5, color=COLOURS["decode"])
left.set(xlabel="cached tokens that the decode reads", ylabel="predicted - measured (%)")
right.scatter(prompts.prefill_tokens, 100 * prompts.off / prompts.seconds, s=7, alpha=0.5, color=COLOURS["prefill"])
right.set(xlabel="prompt tokens of the step")
plt.show()
slope = decodes.context.corr(decodes.off / decodes.seconds)
display(Markdown(f"The error of decodes correlates with the context at {slope:+.2f}."))

# %% [markdown]
# ## The queues on both sides

# %%
figure, axes = plt.subplots(figsize=(7.5, 2.8))
for side, colour in SIDES.items():
    turns = getattr(replay, side).turns
    if turns is not None:
        axes.step(
            turns.t, turns.waiting + turns.swapped, where="post", color=colour, lw=1, label=f"{side}: not running"
        )
axes.set(xlabel="time (s)", ylabel="requests")
axes.legend(fontsize="small")
plt.show()
alike = replay.comparison.decisions
told = "There is no decision log of one side." if alike is None else (
    f"The first {alike.same} of {alike.measured} turns were decided alike, {alike.alike} at the same place."
)  # fmt: skip
display(Markdown(told))

# %% [markdown]
# ## Does the order of settings hold?
# What a sweep is for: the setting that is best in simulation should be best on the device.

# %%
sides = ("simulated", "measured")
table = pd.DataFrame({name: one.errors.loc["makespan", list(sides)] for name, one in several.items()}).T
figure, axes = plt.subplots(figsize=(6, 0.4 * len(table) + 1.2))
for side, colour in SIDES.items():
    axes.scatter(table[side], table.index, color=colour, marker="o" if side == "simulated" else "|", s=60, label=side)
axes.set(xlabel="makespan (s)")
axes.legend(fontsize="small")
plt.show()
same = list(table.simulated.sort_values().index) == list(table.measured.sort_values().index)
told = "one setting has no order" if len(table) == 1 else "the order holds" if same else "the order does not hold"
display(Markdown(f"{len(table)} setting{'s' * (len(table) > 1)}: {told}."))

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
# # Calibration
# What steps cost, where that is known from, and how far it can be trusted: the samples of a probe, the fit through
# them, its residuals, what was covered; and the uncertainty of a profile that was fitted to logs.
#
# The next cell is all there is to set.

# %% tags=["parameters"]
PROFILE = "h200-llama2-7b"  # a profile with samples: a bundled one by name, or the folder of `sim calibrate probe`
LOGS = "ascend910b4-llama2-7b"  # a profile fitted to logs of real runs: a name, or the folder of `sim calibrate logs`

# %%
import matplotlib.pyplot as plt
import servesim
from IPython.display import Markdown, display

plt.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3})
COLOURS = {"prefill": "#3b5bdb", "decode": "#0b6e4f", "mixed": "#e0a33e", "swap": "#7a5bb5"}
probed, logged = servesim.load(PROFILE), servesim.load(LOGS)
samples = probed.samples[probed.samples.kind.isin(COLOURS)]
points = probed.points[probed.points.kind.isin(COLOURS)]
display(Markdown(f"**{probed}**: {probed.about['how']}"))

# %% [markdown]
# ## What was measured
# Every dot is a point of the grid. A run whose steps lie outside of what was covered is labelled "outside profile".

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
prompts, decodes = points[points.prefill_rows > 0], points[(points.decode_rows > 0) & (points.prefill_rows == 0)]
left.scatter(prompts.prefill_tokens, prompts.prefill_rows, s=8 + 2 * prompts.taken, color=COLOURS["prefill"], alpha=0.6)
left.set(xscale="log", xlabel="prompt tokens of the step", ylabel="prompts", title="prefill and mixed steps")
right.scatter(decodes.decode_rows, decodes.context, s=8 + 2 * decodes.taken, color=COLOURS["decode"], alpha=0.6)
right.set(xscale="log", yscale="log", xlabel="decoding rows", ylabel="cached tokens read", title="decode steps")
plt.show()
counts = points.groupby("kind").taken.agg(["size", "sum"])
told = ", ".join(f"{kind} {row['size']:.0f} ({row['sum']:.0f} samples)" for kind, row in counts.iterrows())
failed = probed.samples[probed.samples.failed != ""].point.nunique()
display(Markdown(f"Points measured: {told}; {failed} failed. Larger dots were measured more often."))

# %% [markdown]
# ## Samples and fit: prompts
# Dots are measured steps, crosses what the fit says of the same shapes.

# %%
prefill = samples[(samples.kind == "prefill") & (samples.failed == "")]
figure, axes = plt.subplots(figsize=(7, 3.6))
axes.scatter(
    prefill.prefill_tokens, 1e3 * prefill.seconds, s=10, color=COLOURS["prefill"], alpha=0.35, label="measured"
)
axes.scatter(prefill.prefill_tokens, 1e3 * prefill.expected, s=22, marker="x", lw=0.8, color="black", label="fit")
axes.set(xscale="log", yscale="log", xlabel="prompt tokens of the step", ylabel="step (ms)")
axes.legend()
plt.show()
shown = points[points.kind == "prefill"]
display(Markdown(
    f"From {shown.prefill_tokens.min()} to {shown.prefill_tokens.max()} tokens a prefill takes "
    f"{1e3 * shown.seconds.min():.3g} to {1e3 * shown.seconds.max():.3g} ms; the fit is off by "
    f"{shown.error.abs().median():.1%} at the median point."
))  # fmt: skip

# %% [markdown]
# ## Samples and fit: decodes
# The more rows, the longer a step; the spread at one number of rows is the context that they read.

# %%
decode = samples[(samples.kind == "decode") & (samples.failed == "")]
figure, axes = plt.subplots(figsize=(7, 3.6))
dots = axes.scatter(
    decode.decode_rows,
    1e3 * decode.seconds,
    s=12,
    c=decode.context / decode.decode_rows,
    cmap="viridis",
    label="measured",
)
axes.scatter(decode.decode_rows, 1e3 * decode.expected, s=22, marker="x", lw=0.8, color="black", label="fit")
axes.set(xlabel="decoding rows", ylabel="step (ms)")
figure.colorbar(dots, label="cached tokens a row")
axes.legend()
plt.show()
shown = points[points.kind == "decode"]
display(Markdown(
    f"From {shown.decode_rows.min()} to {shown.decode_rows.max()} rows a decode takes {1e3 * shown.seconds.min():.3g} "
    f"to {1e3 * shown.seconds.max():.3g} ms; the fit is off by {shown.error.abs().median():.1%} at the median point."
))  # fmt: skip

# %% [markdown]
# ## Residuals
# The error of the fit, point by point. It should scatter about zero at every duration: a trend is a term that is
# missing.

# %%
figure, axes = plt.subplots(figsize=(7, 3.4))
for kind, colour in COLOURS.items():
    mine = points[points.kind == kind]
    axes.scatter(1e3 * mine.seconds, 100 * mine.error, s=14, color=colour, alpha=0.7, label=kind)
axes.axhline(0, color="grey", linewidth=0.8)
axes.set(xscale="log", xlabel="step (ms), median of its samples", ylabel="fit - measured (%)")
axes.legend(fontsize="small", ncols=4)
plt.show()
worst = points.error.abs().idxmax()
display(Markdown(
    f"Half of the points are within {points.error.abs().median():.1%}, nine tenths within "
    f"{points.error.abs().quantile(0.9):.1%}; the worst is a {points.kind[worst]} step, off by "
    f"{points.error[worst]:+.1%}."
))  # fmt: skip

# %% [markdown]
# ## Where it was not led
# The fit made again without a fifth of the points, five times; what it says of those is the error that counts.

# %%
display(probed.errors.round(4))
display(Markdown("; ".join(f"{kind}: {row['mean']:.1%} on average" for kind, row in probed.errors.iterrows())))

# %% [markdown]
# ## How steady the device is
# Samples over what their own point takes at the median, in the order they were taken. A drift is a device that heats
# up or a host that got busy.

# %%
steady = samples[samples.failed == ""].sort_values(["round", "order"])
ratio = steady.seconds / steady.point.map(probed.points.seconds)
figure, axes = plt.subplots(figsize=(8, 3))
axes.scatter(range(len(ratio)), ratio, s=6, c=[COLOURS[kind] for kind in steady.kind], alpha=0.5)
axes.set(xlabel="samples, in the order they were taken", ylabel="seconds / median of the point", yscale="log")
axes.set_yticks([0.8, 1, 1.25, 2, 3], ["0.8", "1", "1.25", "2", "3"])
axes.minorticks_off()
plt.show()
display(Markdown(
    f"Nine tenths of the samples are between {ratio.quantile(0.05):.2f} and {ratio.quantile(0.95):.2f} times the "
    f"median of their point; {(probed.samples.flagged != '').sum()} were flagged as outliers and kept out of the fit."
))  # fmt: skip

# %% [markdown]
# ## Without a device: uncertainty from logs
# Another profile, for which no step was ever measured: its parameters were fitted to logs and totals of real runs, with
# the simulator inside the fit. Every parameter has an interval.

# %%
display(Markdown(f"**{logged}**: {logged.about['how']}"))
shared = logged.parameters[~logged.parameters.index.str.startswith("cold")]
figure, axes = plt.subplots(figsize=(7, 0.45 * len(shared) + 1))
low, high = shared.low / shared.value, shared.high / shared.value
axes.errorbar([1.0] * len(shared), shared.index, xerr=[1 - low, high - 1], fmt="o", capsize=3, color="#3b5bdb")
axes.axvline(1, color="grey", linewidth=0.8)
axes.set(xscale="log", xlabel="interval, times the fitted value")
axes.set_xticks([0.5, 0.7, 1, 1.4, 2], ["0.5", "0.7", "1", "1.4", "2"])
axes.minorticks_off()
plt.show()
width = (high / low).sort_values()
best, worst = width.index[0], width.index[-1]
display(Markdown(
    f"Best known is *{best}*, between {low[best]:.2f} and {high[best]:.2f} times its value; worst is *{worst}*, "
    f"between {low[worst]:.2f} and {high[worst]:.2f} times: the runs at hand hardly tell it apart from the others."
))  # fmt: skip

# %% [markdown]
# ## What the fitted profile says of runs
# Runs that it was fitted to, the same left out in turn, and runs that it never saw.

# %%
figure, axes = plt.subplots(figsize=(7, 0.3 * len(logged.runs) + 1))
colours = logged.runs.used.map({"fitted": "#9aa1ab", "left_out": "#e0a33e", "predicted": "#3b5bdb"})
axes.barh(
    [f"{run} ({used})" for run, used in zip(logged.runs.run, logged.runs.used)], 100 * logged.runs.error, color=colours
)
axes.axvline(0, color="grey", linewidth=0.8)
axes.invert_yaxis()
axes.set(xlabel="makespan: predicted - measured (%)")
plt.show()
unseen = logged.runs[logged.runs.used == "predicted"].error.abs()
display(Markdown(
    f"{len(unseen)} runs that the fit never saw are predicted within {unseen.max():.1%}, half of them within "
    f"{unseen.median():.1%}."
))  # fmt: skip

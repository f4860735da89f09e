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
# # Can I trust the step times of this profile?
# For engineers who have calibrated a profile (step times of one device and model), or use a bundled one. First a
# profile of measured steps: its range, its fit and its errors. Then a profile that was fitted to logs. The last section
# has the answer.
#
# Set the parameters in the next cell.

# %% tags=["parameters"]
PROFILE = "h200-llama2-7b"  # profile with samples: name of a bundled profile, or folder of `sim calibrate probe`
LOGS = "ascend910b4-llama2-7b"  # profile fitted to logs: name of a bundled profile, or folder of `sim calibrate logs`

# %%
import matplotlib.pyplot as plt
import servesim
from IPython.display import Markdown, display

plt.rcParams.update({"figure.constrained_layout.use": True, "axes.grid": True, "grid.alpha": 0.3, "figure.dpi": 75})
COLOURS = {"prefill": "#3b5bdb", "decode": "#0b6e4f", "mixed": "#e0a33e", "swap": "#7a5bb5"}
probed, logged = servesim.load(PROFILE), servesim.load(LOGS)
samples = probed.samples[probed.samples.kind.isin(COLOURS)]
points = probed.points[probed.points.kind.isin(COLOURS)]
probed

# %% [markdown]
# ## Measured range
# One dot per point (measured step shape). Runs with larger steps get the label "outside profile".

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
prompts, decodes = points[points.prefill_rows > 0], points[(points.decode_rows > 0) & (points.prefill_rows == 0)]
left.scatter(prompts.prefill_tokens, prompts.prefill_rows, s=8 + 2 * prompts.taken, color=COLOURS["prefill"], alpha=0.6)
left.set(xscale="log", xlabel="prompt tokens of the step", ylabel="prompts", title="prefill and mixed steps")
right.scatter(decodes.decode_rows, decodes.context, s=8 + 2 * decodes.taken, color=COLOURS["decode"], alpha=0.6)
right.set(xscale="log", yscale="log", xlabel="decode rows", ylabel="cached tokens read", title="decode steps")
plt.show()
counts = points.groupby("kind").taken.agg(["size", "sum"])
summary = ", ".join(f"{kind} {row['size']:.0f} ({row['sum']:.0f} samples)" for kind, row in counts.iterrows())
failed = probed.samples[probed.samples.failed != ""].point.nunique()
display(Markdown(f"Points measured: {summary}; {failed} failed. A larger dot has more samples."))

# %% [markdown]
# ## Samples and fit: prefill steps
# Dots are measured steps. Crosses are the predictions of the fit for the same step shapes.

# %%
prefill = samples[(samples.kind == "prefill") & (samples.failed == "")]
figure, axes = plt.subplots(figsize=(7, 3.6))
axes.scatter(
    prefill.prefill_tokens, 1e3 * prefill.seconds, s=10, color=COLOURS["prefill"], alpha=0.35, label="measured"
)
axes.scatter(prefill.prefill_tokens, 1e3 * prefill.expected, s=22, marker="x", lw=0.8, color="black", label="fit")
axes.set(xscale="log", yscale="log", xlabel="prompt tokens of the step", ylabel="step time (ms)")
figure.legend(loc="outside right upper")
plt.show()
measured = points[points.kind == "prefill"]
display(Markdown(
    f"From {measured.prefill_tokens.min()} to {measured.prefill_tokens.max()} tokens, a prefill takes "
    f"{1e3 * measured.seconds.min():.3g} to {1e3 * measured.seconds.max():.3g} ms. The median error of the fit is "
    f"{measured.error.abs().median():.1%}."
))  # fmt: skip

# %% [markdown]
# ## Samples and fit: decode steps
# The step time grows with the number of rows and with the cached tokens that they read (colour).

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
axes.set(xlabel="decode rows", ylabel="step time (ms)")
figure.colorbar(dots, label="cached tokens per row")
figure.legend(loc="outside right upper")
plt.show()
measured = points[points.kind == "decode"]
display(Markdown(
    f"From {measured.decode_rows.min()} to {measured.decode_rows.max()} rows, a decode takes "
    f"{1e3 * measured.seconds.min():.3g} to {1e3 * measured.seconds.max():.3g} ms. The median error of the fit is "
    f"{measured.error.abs().median():.1%}."
))  # fmt: skip

# %% [markdown]
# ## Residuals
# Error of the fit at every point. It should scatter around zero for short and for long steps. A trend means that a
# term is missing in the cost model.

# %%
figure, axes = plt.subplots(figsize=(7, 3.4))
for kind, colour in COLOURS.items():
    selected = points[points.kind == kind]
    axes.scatter(1e3 * selected.seconds, 100 * selected.error, s=14, color=colour, alpha=0.7, label=kind)
axes.axhline(0, color="grey", linewidth=0.8)
axes.set(xscale="log", xlabel="step time (ms), median of the point", ylabel="fit - measured (%)")
figure.legend(loc="outside right upper")
plt.show()
worst = points.error.abs().idxmax()
display(Markdown(
    f"The error is at most {points.error.abs().median():.1%} at 50 % of the points, and at most "
    f"{points.error.abs().quantile(0.9):.1%} at 90 %. The largest error is {points.error[worst]:+.1%} "
    f"({points.kind[worst]} step)."
))  # fmt: skip

# %% [markdown]
# ## Held-out error (five folds)
# The fit is repeated five times, each time without one fifth of the points. The error at the points that were left out
# estimates the error for new step shapes.

# %%
display(probed.errors.round(4))
display(Markdown("; ".join(f"{kind}: mean error {row['mean']:.1%}" for kind, row in probed.errors.iterrows())))

# %% [markdown]
# ## Stability of the device
# Each sample divided by the median of its point, in the order of measurement. If the values rise over time, the device
# may have become hot or the host busy.

# %%
steady = samples[samples.failed == ""].sort_values(["round", "order"])
ratio = steady.seconds / steady.point.map(probed.points.seconds)
figure, axes = plt.subplots(figsize=(8, 3))
axes.scatter(range(len(ratio)), ratio, s=6, c=[COLOURS[kind] for kind in steady.kind], alpha=0.5)
axes.set(xlabel="samples, in the order of measurement", ylabel="step time / median of the point", yscale="log")
axes.set_yticks([0.8, 1, 1.25, 2, 3], ["0.8", "1", "1.25", "2", "3"])
axes.minorticks_off()
plt.show()
display(Markdown(
    f"90 % of the samples are between {ratio.quantile(0.05):.2f} and {ratio.quantile(0.95):.2f} times the median of "
    f"their point. {(probed.samples.flagged != '').sum()} outliers were flagged and not used in the fit."
))  # fmt: skip

# %% [markdown]
# ## Profile from logs: parameter intervals
# No single step was measured for this profile. Its parameters were fitted to logs and total times of real runs: the
# fit simulates these runs. Every parameter has a confidence interval.

# %%
display(logged)
shared = logged.parameters[~logged.parameters.index.str.startswith("cold")]
figure, axes = plt.subplots(figsize=(7, 0.45 * len(shared) + 1))
low, high = shared.low / shared.value, shared.high / shared.value
axes.errorbar([1.0] * len(shared), shared.index, xerr=[1 - low, high - 1], fmt="o", capsize=3, color="#3b5bdb")
axes.axvline(1, color="grey", linewidth=0.8)
axes.set(xscale="log", xlabel="interval / fitted value")
axes.set_xticks([0.5, 0.7, 1, 1.4, 2], ["0.5", "0.7", "1", "1.4", "2"])
axes.minorticks_off()
plt.show()
width = (high / low).sort_values()
best, worst = width.index[0], width.index[-1]
display(Markdown(
    f"*{best}* has the narrowest interval: {low[best]:.2f} to {high[best]:.2f} times its value. *{worst}* has the "
    f"widest: {low[worst]:.2f} to {high[worst]:.2f} times. To narrow it, fit to runs with other step shapes."
))  # fmt: skip

# %% [markdown]
# ## Profile from logs: error of each run
# fitted: runs used in the fit. left out: the same runs, each predicted by a fit to the others. predicted: runs
# that were never used in a fit.

# %%
figure, axes = plt.subplots(figsize=(7, 0.3 * len(logged.runs) + 1))
colours = logged.runs.used.map({"fitted": "#9aa1ab", "left_out": "#e0a33e", "predicted": "#3b5bdb"})
names = [f"{run} ({used.replace('_', ' ')})" for run, used in zip(logged.runs.run, logged.runs.used)]
axes.barh(names, 100 * logged.runs.error, color=colours)
axes.axvline(0, color="grey", linewidth=0.8)
axes.invert_yaxis()
axes.set(xlabel="Makespan: predicted - measured (%)")
plt.show()
unseen = logged.runs[logged.runs.used == "predicted"].error.abs()
display(Markdown(
    f"The fit did not use {len(unseen)} runs. Their largest makespan error is {unseen.max():.1%}, the median is "
    f"{unseen.median():.1%}."
))  # fmt: skip

# %% [markdown]
# ## Answer

# %%
held_out = (probed.errors["mean"] * probed.errors.points).sum() / probed.errors.points.sum()
longest, most = points.prefill_tokens.max(), points.decode_rows.max()
above = points.error.abs().gt(0.1).mean()
display(Markdown(
    f"**{PROFILE}**: {'yes' if held_out < 0.05 else 'only roughly'}, for steps of up to {longest:,} prompt tokens and "
    f"{most:,} decode rows. The mean error at step shapes that the fit did not see is {held_out:.1%}; {above:.1%} of "
    f"the points have an error above 10 %. Outside this range, runs get the label *outside profile*.\n\n"
    f"**{LOGS}**: {'yes' if unseen.max() < 0.05 else 'only roughly'}, for makespans. The largest error of a run that "
    f"the fit did not use is {unseen.max():.1%}. Its single parameters are less certain: the interval of *{worst}* is "
    f"{low[worst]:.2f} to {high[worst]:.2f} times its value."
))  # fmt: skip

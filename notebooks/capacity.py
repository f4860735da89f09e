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
# For engineers who run vLLM: here Llama-2-7B on one H200. The last section has the command line of the answer.
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
BOUNDS = ["p99_ttft_ms <= 1000", "p95_tpot_ms <= 30"]  # a configuration that misses one of them cannot win
KNOBS = {"policy.max_num_seqs": [64, 256], "policy.max_num_batched_tokens": [512, 2048, 8192]}
RATES = [10, 15, 20, 25]  # requests per second
REPLICATIONS = 3  # runs of each configuration and rate, with different random numbers
PRECISION = 0.02  # of the highest rates
MODEL = "meta-llama/Llama-2-7b-hf"  # on the command line of the server
JOBS = None  # processes; None: one per core

# %%
import matplotlib.pyplot as plt
import servesim
from IPython.display import Markdown, display

plt.rcParams.update({"figure.constrained_layout.use": True, "figure.dpi": 80})
servesim.load(BASE["profile"])

# %% [markdown]
# ## Capacity of the default settings
# The highest request rate that meets all bounds, by bisection. Every rate has the same requests; only their arrival
# times change.

# %%
stock = servesim.capacity(BASE, subject_to=BOUNDS, precision=PRECISION, jobs=JOBS)
stock

# %%
figure, panels = plt.subplots(1, len(BOUNDS), figsize=(5 * len(BOUNDS), 3.2))
for axes, bound in zip(panels, BOUNDS):
    stock.plot(bound.split()[0], axes)
plt.show()
display(Markdown(stock.verdict))

# %% [markdown]
# ## Configurations over the rate
# Every configuration runs at every rate. Bisection then finds its capacity: the highest rate below all rates that miss
# a bound.

# %%
sweep = servesim.sweep(
    base=BASE, params=KNOBS, rates=RATES, subject_to=BOUNDS, precision=PRECISION, objectives=["mean_e2el_ms"],
    replications=REPLICATIONS, jobs=JOBS,
)  # fmt: skip
sweep

# %%
figure, panels = plt.subplots(1, len(BOUNDS), figsize=(5 * len(BOUNDS), 4.2))
for axes, bound in zip(panels, BOUNDS):
    sweep.plot(bound.split()[0], axes, top=4).get_legend().remove()
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
plt.show()
display(Markdown(f"{sweep.verdict} An open point is a rate at which a bound is missed."))

# %% [markdown]
# ## Settings for one rate
# The ranking at the highest rate that the baseline meets, and the winner against the baseline there.

# %%
curve = sweep.curves[(sweep.curves.config == 0) & sweep.curves.rate.isin(RATES)]
rate = curve.rate[curve.meets].max() if curve.meets.any() else RATES[0]
at_rate = sweep.at(rate)
display(Markdown(f"At {rate:g} requests per second: {at_rate.verdict}"))
at_rate

# %%
at_rate.knob_table(metric=BOUNDS[0].split()[0]).round(1)

# %%
changes = at_rate.compare(metrics=["mean_e2el_ms", "p99_ttft_ms", "p95_tpot_ms", "output_throughput"])
changes.plot()
plt.show()
display(Markdown(f"A: baseline, B: winner. {changes.verdict}"))

# %% [markdown]
# ## Answer: the winner on the command line of the server

# %%
print(sweep.export("vllm", sweep.winner if sweep.winner is not None else 0, MODEL))

"""Closed loops with speculative decoding, from a table with and without it; the acceptance rate is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from proof_closed import closed_loop
from proof_load import concurrency_of
from proof_rows import Row, table
from servesim.calibrate.logs.fit import fit_logs
from servesim.calibrate.logs.observed_runs import runs_from
from servesim.config.scenario import scenario_from
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost
from servesim.runs.simulate import simulate

SET = "Qwen3-32B, Ascend A2: suffix decoding"
FITTED = ("HumanEval", "AGIEval")  # data sets whose smallest and largest concurrency are fitted
DRAFTS = 3
ALONE = 20  # requests of a loop with one open request: all are equal, but for the chance of their drafts
SERVER: dict[str, Any] = {
    "policy": {"name": "vllm-v1", "max_num_seqs": 256, "max_num_batched_tokens": 40_960},
    "engine": {"num_blocks": 100_000},  # memory does not bind
}
# 65 GB of weights and 65,536 bytes of KV per token and NPU at 1.6 TB/s
START = {"kind": "linear", "base": 0.05, "decode_row": 1e-4, "context": 5e-8, "prefill_token": 5e-5}
FREE = {"base": 1.0, "decode_row": 1.0, "prefill_token": 1.0, "context": 0.2}
ASSUMED = (
    "the drafter finds 3 tokens in a part of the steps; suffix drafts are scheduled as n-gram drafts, without steps in "
    "flight; all requests of a data set have its mean lengths"
)
REASON = (
    "answers end by themselves: their lengths vary, and the slowest requests run alone; 629 tok/s of AGIEval are more "
    "than 24 requests have with the mean TPOT (554), which counts short answers as much as long ones"
)
Rows = Sequence[Mapping[str, str]]


def predict_suffix(data: Path) -> list[Row]:
    """Fit two loads of two data sets, with and without drafts; predict the other loads and data sets with drafts."""
    rows = table(data / "measured" / "vllm-ascend-docs" / "qwen3-32b_tp4.csv")
    by_name = {name: [row for row in rows if row["dataset"] == name] for name in FITTED}
    fitted = [end(own, key=concurrency_of) for own in by_name.values() for end in (min, max)]
    cost, proposals = fit_drafts(fitted, fit_plain(fitted))
    how = ", ".join(f"{row['dataset']} {row['concurrency']}" for row in fitted)
    result = []
    for row in (row for row in rows if row not in fitted):
        ours = figures_of(row, cost, {
            "method": "ngram", "tokens": DRAFTS, "acceptance": rate_of(row), "proposals": proposals, "drafting": 0.0,
        })  # fmt: skip
        run = f"{row['dataset']}, {row['concurrency']} open requests"
        for quantity, column in (("TPOT mean", "suffix_tpot_ms"), ("tok/s", "suffix_throughput_tok_s")):
            measured = float(row[column])
            result.append(Row(SET, run, quantity, measured, ours[quantity], f"with and without drafts: {how} open "
                              "requests", assumed=ASSUMED, reason=REASON))  # fmt: skip
    return result


def fit_plain(rows: Rows) -> LinearCost:
    """Return the costs of steps without drafts, from the rows without them."""
    runs = [
        {"name": f"{row['dataset']} {row['concurrency']}", "scenario": {"workload": workload_of(row)},
         "reported": {"mean_tpot_ms": float(row["tpot_ms"])}}
        for row in rows
    ]  # fmt: skip
    spec = runs_from({"scenario": SERVER, "cost": START, "free": FREE, "runs": runs}, SET)
    cost = fit_logs(spec, leave_out=False).cost
    assert isinstance(cost, LinearCost)
    return cost


def fit_drafts(rows: Rows, cost: LinearCost) -> tuple[LinearCost, float]:
    """Return the costs with the time of a draft, and the fraction of steps with drafts.

    A step with drafts takes TPOT x (1 + drafts x acceptance): the time of a plain step, and that of the drafts of all
    rows. `drafts`, their mean per row, and their time per row are what fits best.
    """
    plain = np.array([figures_of(row, cost)["TPOT mean"] for row in rows])
    tpot, accepted = (np.array([float(row[column]) for row in rows]) for column in ("suffix_tpot_ms", ACCEPTED))
    loads = np.array([concurrency_of(row) for row in rows])
    terms = np.column_stack([tpot * accepted / 100, -loads]) / tpot[:, None]
    (drafts, per_row), *_ = np.linalg.lstsq(terms, (plain - tpot) / tpot, rcond=None)
    return replace(cost, draft_token=max(0.0, 1e-3 * float(per_row / drafts))), min(1.0, float(drafts) / DRAFTS)


ACCEPTED = "suffix_accept_rate"  # accepted / drafted, in percent


def rate_of(row: Mapping[str, str]) -> float:
    """Return the rate of each draft, if those before it are accepted, that gives the published share of all drafts."""
    roots = np.roots([1.0, 1.0, 1.0, -DRAFTS * float(row[ACCEPTED]) / 100])
    return float(min(root.real for root in roots if abs(root.imag) < 1e-9 and root.real >= 0))


def figures_of(row: Mapping[str, str], cost: LinearCost, drafts: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Return the simulated figures of a row of the table."""
    scenario = scenario_from({**SERVER, "workload": workload_of(row), "speculative": drafts})
    measures = simulate(scenario, profile=Profile(SET, cost)).measures
    return {"TPOT mean": 1e3 * float(measures.tpot.mean()), "tok/s": measures.outputs / measures.makespan}


def workload_of(row: Mapping[str, str]) -> dict[str, Any]:
    """Return the closed loop of a row."""
    load = concurrency_of(row)
    requests = int(row["requests"]) if load > 1 else ALONE
    return closed_loop(load, requests, int(row["mean_prompt_tokens"]), int(row["mean_output_tokens"]))

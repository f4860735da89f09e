"""aiconfigurator-silicon: closed loops, from the two ends of each curve."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from closed_loops import DENSE, read_curves, runs_of
from proof_intervals import log_profile, predict_observed
from proof_rows import Row, table
from servesim.calibrate.logs.fit import fit_logs

SETS = {True: "silicon curves, dense models: between the end points", False: "silicon curves, mixtures of experts"}
ASSUMED = "token budget 8192, max_num_seqs = concurrency, lengths uniform from 80 %, enough KV memory, no prefix cache"
MEMORY = ("TTFT of this curve jumps between two concurrencies: the KV memory, which is not published, probably binds "
          "there; the fit takes the wait for prefill time")  # fmt: skip
QUANTITIES = {"mean_tpot_ms": "TPOT mean", "mean_ttft_ms": "TTFT mean"}


def predict_curves(data: Path, dense: bool) -> list[Row]:
    """Fit the least and the greatest concurrency of each curve; predict the points between."""
    path, rows = data / "measured" / "aiconfigurator-silicon" / "points.csv.gz", []
    models = tuple(dict.fromkeys(row["model"] for row in table(path) if (row["model"] in DENSE) == dense))
    for name, points in read_curves(path, models).items():
        about = points[0]
        setting = f"{about['model'].split('/')[-1]}, {about['system']}, {about['isl']}/{about['osl']}, {name}"
        ttft = [float(point["ttft_mean_ms"]) for point in points]
        jumps = any(high > 4 * low for low, high in zip(ttft, ttft[1:]))
        spec = runs_of(points)
        profile = log_profile(fit_logs(spec, leave_out=False), spec)
        for run in (run for run in spec.runs if not run.fit):
            ours = predict_observed(run, profile)
            for figure, quantity in QUANTITIES.items():
                reason = MEMORY if jumps and quantity == "TTFT mean" else ""
                rows.append(
                    Row(SETS[dense], f"{setting}, {run.name}", quantity, run.reported[0].figures[figure],
                        ours.figures[figure], "end points", {}, ASSUMED, reason, ours.interval(figure))
                )  # fmt: skip
    return rows


predict_dense, predict_experts = partial(predict_curves, dense=True), partial(predict_curves, dense=False)

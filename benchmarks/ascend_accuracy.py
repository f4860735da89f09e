"""Accuracy of the bundled Ascend profile: simulated and measured makespan of every run, fitted or predicted.

    python benchmarks/ascend_accuracy.py [RUNS.yaml]

This script fits nothing: it uses the costs of the profile. RUNS.yaml names the files with logs and lengths.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from servesim.calibrate.logs.fit import RunError, run_error
from servesim.calibrate.logs.observed_runs import ObservedRun, read_runs
from servesim.calibrate.logs.residuals import predict
from servesim.calibrate.logs.text import format_percent
from servesim.costs.device_profile import Profile, load_profile

NAME = "ascend910b4-llama2-7b"
RUNS = Path(__file__).resolve().parents[1] / "calibrate" / "profiles" / NAME / "runs.yaml"
MAX_ERRORS = {"makespan": 0.02, "ttft": 0.10, "e2e": 0.05}


def cold_starts(profile: Profile) -> dict[str, tuple[float, float]]:
    """Return the extra seconds of the first prefill and the first decode, by run."""
    fitted = profile.about["fit"]["cold_start"]
    return {run: (cold["prefill"], cold["decode"]) for run, cold in fitted.items()}


def predict_all(runs: list[ObservedRun], profile: Profile) -> list[tuple[ObservedRun, RunError]]:
    """Simulate every run with the costs of the profile."""
    cold = cold_starts(profile)
    return [(run, run_error(run, predict(run, profile.cost, cold.get(run.name, (0.0, 0.0))))) for run in runs]


def exceeded_limits(result: RunError) -> str:
    """Return the metrics whose error exceeds MAX_ERRORS."""
    errors = {"makespan": abs(result.error or 0.0), "ttft": result.ttft or 0.0, "e2e": result.e2e or 0.0}
    return ", ".join(name for name, limit in MAX_ERRORS.items() if errors[name] > limit)


def main() -> int:
    """Print the table; return 3 if the error of a predicted run exceeds MAX_ERRORS."""
    profile = load_profile(NAME)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RUNS
    runs = read_runs(path).runs
    start = time.perf_counter()
    table = predict_all(runs, profile)
    seconds = time.perf_counter() - start
    print("| run | batch | used | measured s | predicted s | makespan | ttft (median) | e2e (median) |")
    print("|---|---|---|---|---|---|---|---|")
    for run, result in table:
        batch = run.scenario.policy.get("decode_batch", 1)
        used = "fitted" if run.fit else "predicted"
        measured, error = ("", "") if result.error is None else (f"{result.measured:.1f}", f"{result.error:+.2%}")
        cells = (run.name, batch, used, measured, f"{result.predicted:.1f}", error)
        print("| " + " | ".join(map(str, (*cells, format_percent(result.ttft), format_percent(result.e2e)))) + " |")
    exceeded = [
        f"{run.name}: {exceeded_limits(result)}" for run, result in table if not run.fit and exceeded_limits(result)
    ]
    fitted = sum(run.fit for run in runs)
    print(f"\n{fitted} fitted, {len(runs) - fitted} predicted; simulated in {seconds:.1f} s")
    print("error limits exceeded: " + ("; ".join(exceeded) or "none"))
    return 3 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main())

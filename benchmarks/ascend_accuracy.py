"""How well the bundled Ascend profile predicts real runs: which it was fitted on, which it never saw, and the errors.

    python benchmarks/ascend_accuracy.py [RUNS.yaml]

Nothing is fitted here: the costs are those in the profile. Logs and lengths are read where the file of runs says.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from servesim.calibrate.logs.fit import Judged, judge
from servesim.calibrate.logs.observed_runs import Observed, read_runs
from servesim.calibrate.logs.text import percent
from servesim.costs.device_profile import Profile, load_profile

NAME = "ascend910b4-llama2-7b"
RUNS = Path(__file__).resolve().parents[1] / "calibrate" / "profiles" / NAME / "runs.yaml"  # logs beside the checkout
CLAIM = {"makespan": 0.02, "ttft": 0.10, "e2e": 0.05}


def cold_starts(profile: Profile) -> dict[str, tuple[float, float]]:
    """Return how long the first calls of each cold run took longer."""
    found = profile.about["fit"]["cold_start"]
    return {run: (cold["prefill"], cold["decode"]) for run, cold in found.items()}


def judged(runs: list[Observed], profile: Profile) -> list[tuple[Observed, Judged]]:
    """Predict every run with the profile as it is."""
    return [(run, judge(run, profile.cost, cold_starts(profile))) for run in runs]


def claims(result: Judged) -> str:
    """Say which of the claims a predicted run breaks."""
    off = {"makespan": abs(result.error), "ttft": result.ttft or 0.0, "e2e": result.e2e or 0.0}
    return ", ".join(name for name, limit in CLAIM.items() if off[name] > limit)


def main() -> int:
    """Print the table; 3 if a predicted run breaks a claim."""
    profile = load_profile(NAME)
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RUNS
    runs = read_runs(path).runs
    start = time.perf_counter()
    table = judged(runs, profile)
    took = time.perf_counter() - start
    print("| run | batch | used | measured s | predicted s | makespan | ttft (median) | e2e (median) |")
    print("|---|---|---|---|---|---|---|---|")
    for run, result in table:
        batch = run.scenario.policy.get("decode_batch", 1)
        used = "fitted" if run.fit else "predicted"
        print(
            f"| {run.name} | {batch} | {used} | {result.measured:.1f} | {result.predicted:.1f} | {result.error:+.2%} "
            f"| {percent(result.ttft)} | {percent(result.e2e)} |"
        )
    broken = [f"{run.name}: {claims(result)}" for run, result in table if not run.fit and claims(result)]
    fitted = sum(run.fit for run in runs)
    print(f"\n{fitted} fitted, {len(runs) - fitted} predicted; simulated in {took:.1f} s")
    print("claims broken: " + ("; ".join(broken) or "none"))
    return 3 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

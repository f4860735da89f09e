"""Small tuning problems: a sweep whose profile is wrong, and a device without waiting."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from servesim.calibrate.device.backend import MODELS
from servesim.calibrate.device.fake import FakeBackend
from servesim.calibrate.live.replay_job import replay
from servesim.calibrate.live.setup import replay_arguments
from servesim.calibrate.replay.measured_run import MeasuredRun, run_from_result
from servesim.calibrate.replay.replay import as_backend_scenario, replay_requests
from servesim.calibrate.tune.loop import Tuner, TuneResult
from servesim.calibrate.tune.setup import Settings, tuned_experiment
from servesim.config.scenario import Scenario
from servesim.costs.device_profile import Profile
from servesim.costs.mapping import cost_from
from servesim.engine.clocks import VirtualClock
from servesim.study.executor import Serial
from servesim.study.ranking import Summary
from servesim.study.sweep import sweep
from servesim.study.sweep_file import read_experiment

DECODE_TERMS = ("decode_step", "decode_row", "decode_live", "context")
TRUE_COST = {"prefill": 0.003, "prefill_token": 8e-5, "decode_step": 0.004, "decode_row": 4e-4, "context": 2e-7}


def cheap_decodes(cost: Mapping[str, float], factor: float = 0.8) -> dict[str, float]:
    """Return a wrong profile: decodes are too cheap."""
    return {name: value * (factor if name in DECODE_TERMS else 1.0) for name, value in cost.items()}


def sweep_tree(profile: Any = None, rate: float = 30.0, requests: int = 40, **changes: Any) -> dict[str, Any]:
    """Return a sweep file with a wrong profile. With the true costs another configuration wins."""
    lengths = {
        "prompt": {"kind": "uniform", "low": 10, "high": 120},
        "output": {"kind": "uniform", "low": 4, "high": 40},
    }
    workload = {"requests": requests, "arrivals": {"kind": "poisson", "rate": rate}, "lengths": lengths}
    base = {
        "workload": workload,
        "engine": {"num_blocks": 400, "block_size": 8},
        "policy": {"name": "llm-serving", "decode_batch": 8, "prefill_batch": 1},
        "profile": cheap_decodes(TRUE_COST) if profile is None else profile,
    }
    params = {"policy.decode_batch": [4, 8, 16], "policy.prefill_batch": [1, 2]}
    return {"name": "problem", "base": base, "params": params, "objectives": ["mean_e2el_ms"], **changes}


def write_sweep(folder: Path, tree: Mapping[str, Any]) -> Path:
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(dict(tree)))
    return path


def true_summary(file: Path, cost: Mapping[str, Any], folder: Path) -> Summary:
    """Return the sweep with the true costs."""
    tree = yaml.safe_load(file.read_text())
    tree["base"]["profile"] = dict(cost)
    path = file.with_name("true.yaml")
    path.write_text(yaml.safe_dump(tree))
    experiment = tuned_experiment(read_experiment(path), on_backend=True)
    return Summary(experiment, sweep(experiment, folder, Serial()))


@dataclass
class VirtualTarget:
    """A device that runs the live engine loop in virtual time, with its true costs."""

    cost: Mapping[str, Any]
    fail_after: int = 1_000_000  # measurements
    measured: list[str] = field(default_factory=list)
    has_steps = True
    host_separate = False
    ready = True

    def measure(
        self, name: str, scenario: Scenario, file: Path, profile: Profile, max_seconds: float
    ) -> tuple[MeasuredRun, float]:
        if len(self.measured) == self.fail_after:
            raise RuntimeError("the device failed")
        self.measured.append(name)
        scenario = as_backend_scenario(scenario)
        requests = replay_requests(scenario)
        backend = FakeBackend({})
        backend.load(MODELS["llama2-7b"], scenario.engine.num_blocks + 1, scenario.engine.block_size)
        args = replay_arguments(scenario, requests, MODELS["llama2-7b"], 0)
        result = json.loads(json.dumps(replay(backend, args, clock=VirtualClock(cost_from(self.cost, "cost")))))
        return run_from_result(scenario, profile, replay_requests(scenario), result), result["end"]


def tune(file: Path, target: Any, folder: Path, resume: bool = False, draws: int = 4, **limits: Any) -> TuneResult:
    """Tune in this process."""
    experiment = tuned_experiment(read_experiment(file), on_backend=True)
    return Tuner(experiment, target, folder, Serial(), Settings(draws=draws, **limits)).run({}, resume)


def random_cost(seed: int) -> dict[str, float]:
    """Return true costs that differ between seeds."""
    rng = random.Random(seed)
    return {name: value * rng.uniform(0.5, 2.0) for name, value in TRUE_COST.items()}


def regret(summary: Summary, config: int) -> float:
    """Return how much worse a configuration is than the best, as a fraction."""
    metric = summary.experiment.objectives[0].metric
    values: Sequence[float] = [row.mean(metric) for row in summary.rows if row.eligible]
    own = next(row.mean(metric) for row in summary.rows if row.config == config)
    return own / min(values) - 1

"""Fits of synthetic engines: draw true costs, sample their steps with noise, fit, and predict another workload.

    python benchmarks/synthetic_engines.py [NUMBER]

Each engine has its own curves, its own rule for mixed steps, sometimes padding buckets, and noise of 1 to 20 % with
stalls. Half of them are sampled on a probe's grid, half in the steps of a run. The table compares the makespan of a
random workload with the true costs and with the fitted ones, and with the 95 % interval of random costs.
"""

from __future__ import annotations

import random
import sys
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
from servesim.calibrate.probe.fit import fit_samples
from servesim.calibrate.probe.grid import Point, grid
from servesim.calibrate.probe.sample_set import Samples
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import Shape, StepCost
from servesim.costs.device_profile import Profile
from servesim.costs.uncertainty import Uncertainty
from servesim.runs.simulate import load_trace, simulate

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
TOKEN_BUCKETS = (32, 64, 128, 256, 512)
MAX_ERROR = 0.03
DRAWS = 32
Z = 1.96  # of a 95 % interval


@dataclass
class TrueEngine(StepCost):
    """A device whose costs are not exactly those of any fitted model."""

    fixed: float  # seconds of a small step
    token: float  # seconds per token of a large one
    knee: float  # sharpness of the change between them
    row: float  # per prompt
    square: float
    cross: float
    decode_fixed: float
    decode_row: float
    bend: float  # exponent of the decode time over rows
    context: float
    mixed: str  # sum, pass or overlap
    shared: float  # of mixed steps: fraction of the fixed time that both parts share, or the overlap
    padded: bool

    def prefill(self, rows: int, tokens: int, squares: int, cross: int) -> float:
        if self.padded and tokens <= TOKEN_BUCKETS[-1]:
            tokens = TOKEN_BUCKETS[bisect_left(TOKEN_BUCKETS, tokens)]
        linear = (self.fixed**self.knee + (self.token * tokens) ** self.knee) ** (1 / self.knee)
        return linear + self.row * rows + self.square * squares + self.cross * cross

    def decode(self, rows: int, live: int, context: int) -> float:
        if self.padded and rows <= ROW_BUCKETS[-1]:
            rows = ROW_BUCKETS[bisect_left(ROW_BUCKETS, rows)]
        return self.decode_fixed + self.decode_row * rows**self.bend + self.context * context

    def seconds(self, shape: Shape) -> float:
        rows, live, context = shape.decode_rows, shape.decode_live, shape.context
        prompt = (shape.prefill_rows, shape.prefill_tokens, shape.squares, shape.cross)
        if not shape.prefill_rows:
            return self.decode(rows, live, context)
        if not rows:
            return self.prefill(*prompt)
        if self.mixed == "pass":
            return self.prefill(prompt[0], prompt[1] + rows, *prompt[2:]) + self.context * context
        parts = self.prefill(*prompt), self.decode(rows, live, context)
        hidden = min(parts) if self.mixed == "overlap" else min(self.fixed, self.decode_fixed)
        return sum(parts) - self.shared * hidden


def draw_engine(rng: random.Random) -> TrueEngine:
    """Return random true costs, from a small model on a CPU to a large one on a slow GPU."""
    scale = 10 ** rng.uniform(-3.0, -1.5)
    token = scale * 10 ** rng.uniform(-3.0, -2.0)
    return TrueEngine(
        fixed=scale, token=token, knee=rng.choice([1.0, 1.0, 2.0, 4.0]), row=scale * rng.choice([0, 0.01, 0.05]),
        square=token * 10 ** rng.uniform(-5.0, -4.0), cross=token * 10 ** rng.uniform(-4.7, -3.7),
        decode_fixed=scale * rng.uniform(0.7, 1.3), decode_row=scale * 10 ** rng.uniform(-2.5, -1.5),
        bend=rng.choice([0.8, 1.0, 1.0, 1.2]), context=scale * 10 ** rng.uniform(-5.3, -4.3),
        mixed=rng.choice(["sum", "pass", "overlap"]), shared=rng.uniform(0.2, 1.0), padded=rng.random() < 0.3,
    )  # fmt: skip


def draw_scenario(rng: random.Random, engine: TrueEngine) -> Scenario:
    """Return a random workload near or above the capacity of the engine, and a random policy."""
    prompt, output = rng.choice([32, 128, 400]), rng.choice([16, 64, 128])
    step = engine.decode(16, 16, 16 * (prompt + output // 2))
    rate = rng.uniform(0.3, 1.5) * 16 / (step * output + 16 * engine.prefill(1, prompt, prompt**2, 0))
    lengths = {
        "kind": "lognormal",
        "prompt": {"median": prompt, "sigma": 0.6, "max": 900},
        "output": {"median": output, "sigma": 0.5, "max": 400},
    }
    return scenario_from({
        "workload": {"requests": 60, "arrivals": {"kind": "poisson", "rate": rate}, "lengths": lengths},
        "policy": {"name": rng.choice(["vllm", "vllm-v1", "sarathi"]), "max_num_seqs": rng.choice([16, 32, 48])},
        "engine": {"num_blocks": 4000}, "seed": rng.randrange(1000),
    })  # fmt: skip


class RecordedSteps(StepCost):
    """Another cost model, and the shapes of all steps that it was asked for."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.shapes: list[Shape] = []

    def seconds(self, shape: Shape) -> float:
        self.shapes.append(shape)
        return self.cost.seconds(shape)


def steps_of_a_run(scenario: Scenario, engine: TrueEngine) -> list[Shape]:
    """Return the shapes of the steps of a run."""
    recorded = RecordedSteps(engine)
    simulate(scenario, hold=False, profile=Profile("recorded", recorded))
    return recorded.shapes


def steps_of_a_probe(seed: int) -> list[Shape]:
    """Return the shapes of a probe's grid, three samples each."""
    points = [point for point in grid(64, 2048, 1024, seed=seed) if point.kind in ("prefill", "decode", "mixed")]
    return [shape_of(point) for point in points for _ in range(3)]


def shape_of(point: Point) -> Shape:
    """Return the shape of a point of the grid with equal rows."""
    tokens, live = point.rows * point.tokens, point.decoding
    squares, cross = tokens * point.tokens, tokens * point.cached
    return Shape(point.rows, tokens, tokens, squares, cross, live, live, live * point.context)


def measure(shapes: list[Shape], engine: TrueEngine, rng: np.random.Generator) -> Samples:
    """Return noisy samples; one in 200 steps stalls for up to four times its time."""
    scatter = float(np.exp(rng.uniform(np.log(0.01), np.log(0.2))))
    seconds = np.array([engine.seconds(shape) for shape in shapes])
    seconds *= np.exp(rng.normal(-(scatter**2) / 2, scatter, len(shapes)))
    stalled = rng.random(len(shapes)) < 0.005
    seconds[stalled] *= rng.uniform(3.5, 8.0, int(stalled.sum()))
    points = {shape: number for number, shape in enumerate(dict.fromkeys(shapes))}
    return Samples.from_shapes(shapes, seconds, [points[shape] for shape in shapes])


@dataclass
class Result:
    """Errors of one engine."""

    name: str
    error: float  # of the makespan
    half_width: float  # of its 95 % interval, relative

    @property
    def inside(self) -> bool:
        return abs(self.error) <= self.half_width


@dataclass
class FittedEngine:
    """An engine, the fit to its samples, and another workload."""

    engine: TrueEngine
    fitted: Any
    scenario: Scenario
    source: str  # of the samples
    rng: random.Random


def fit_engine(seed: int) -> FittedEngine:
    """Draw an engine and a workload, and fit the samples of the engine."""
    rng = random.Random(f"engine {seed}")
    engine = draw_engine(rng)
    source = rng.choice(["probe", "run"])
    scenario = draw_scenario(rng, engine)
    shapes = steps_of_a_probe(seed) if source == "probe" else steps_of_a_run(longer(scenario), engine)
    about = {"row_buckets": ROW_BUCKETS, "token_buckets": TOKEN_BUCKETS} if engine.padded else {}
    fitted = fit_samples(measure(shapes, engine, np.random.default_rng(seed)), about)
    return FittedEngine(engine, fitted, scenario, source, rng)


def try_engine(seed: int, draws: int = DRAWS) -> Result:
    """Draw an engine, fit its samples, and predict another workload."""
    case = fit_engine(seed)
    engine, fitted, scenario, source = case.engine, case.fitted, case.scenario, case.source
    trace = load_trace(scenario)

    def makespan(cost: StepCost) -> float:
        return float(simulate(scenario, trace=trace, profile=Profile("synthetic", cost)).measures.makespan)

    true, predicted = makespan(engine), makespan(fitted.cost)
    drawn = Uncertainty(fitted.draws).representatives(fitted.cost, draws)
    spread = np.std([makespan(cost) for cost in drawn], ddof=1)
    name = f"{seed} {source}, {engine.mixed}{', padded' if engine.padded else ''}, {scenario.policy['name']}"
    return Result(name, predicted / true - 1, float(Z * spread / predicted))


def longer(scenario: Scenario) -> Scenario:
    """Return a longer workload with other lengths, whose steps are the samples; the policy is the same."""
    lengths = {"kind": "lognormal", "prompt": {"median": 128, "sigma": 1.0, "max": 900},
               "output": {"median": 64, "sigma": 0.8, "max": 400}}  # fmt: skip
    workload = {**(scenario.workload or {}), "requests": 150, "lengths": lengths}
    return scenario_from({**scenario.model_dump(exclude_unset=True), "workload": workload, "seed": scenario.seed + 1})


def main() -> int:
    """Print one line per engine that is off, and the counts; return 3 if too many are."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    start = time.perf_counter()
    results: list[Any] = []
    for seed in range(count):
        result = try_engine(seed)
        results.append(result)
        if abs(result.error) > MAX_ERROR or not result.inside:
            print(f"{result.name:<44} makespan {result.error:+.2%}, interval +-{result.half_width:.2%}", flush=True)
    close, inside = sum(abs(r.error) <= MAX_ERROR for r in results), sum(r.inside for r in results)
    median = float(np.median([r.half_width for r in results]))
    print(f"{count} engines in {time.perf_counter() - start:.0f} s: makespan within {MAX_ERROR:.0%} in {close}, "
          f"inside the 95 % interval in {inside} (median +-{median:.1%})")  # fmt: skip
    return 0 if close >= 0.95 * count and inside >= 0.9 * count else 3


if __name__ == "__main__":
    sys.exit(main())

"""What a step log shows of its engine: padded contexts, rows that grow with contexts, drafts, steps in flight."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servesim.calibrate.imports.fit_steps import find_context_step
from servesim.calibrate.probe.fit_errors import check_fit
from servesim.calibrate.probe.fitted_profile import fit_profile
from servesim.calibrate.probe.sample_set import Samples, grouped
from servesim.cli import main
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Shape, StepCost
from servesim.costs.device_profile import Profile, load_profile
from servesim.costs.linear import LinearCost
from servesim.costs.parts import DecodePart, MixedPart, PartsCost, PrefillPart
from servesim.costs.profile_verdict import verdict_on
from servesim.runs.simulate import Run, simulate

STEP = 16_384
PREFILL = PrefillPart(((1, 0.02), (8192, 0.3)))
PADDED = PartsCost(PREFILL, DecodePart(((1, 0.02), (64, 0.024)), context=1e-6, context_step=STEP), MixedPart(row=1e-5))
LOG = {
    "requests": 60,
    "arrivals": {"kind": "poisson", "rate": 1.0},
    "lengths": {"prompt": [600, 1200], "output": [100, 200]},
}


class Recorder(StepCost):
    """A cost model that notes its steps."""

    def __init__(self, cost: StepCost) -> None:
        self.cost, self.shapes = cost, list[Shape]()

    def seconds(self, shape: Shape) -> float:
        self.shapes.append(shape)
        return self.cost.seconds(shape)


def run_of(cost: StepCost, workload: dict[str, Any], every_step: bool = False, profile: Any = None) -> Run:
    tree = {
        "workload": workload,
        "policy": {"name": "vllm-v1", "async_scheduling": False},
        "engine": {"num_blocks": 20000},
    }
    return simulate(scenario_from(tree), hold=not every_step, profile=profile or Profile("known", cost))


def steps_of(cost: StepCost, workload: dict[str, Any]) -> list[Shape]:
    recorder = Recorder(cost)
    run_of(recorder, workload, every_step=True)
    return recorder.shapes


def import_log(folder: Path, rows: list[dict[str, Any]]) -> Profile:
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert main(["calibrate", "import", "steps", str(folder / "log.jsonl"), "-o", str(folder / "profile")]) == 0
    return load_profile(str(folder / "profile"))


def row_of(shape: Shape) -> dict[str, Any]:
    return {
        name: value for name, value in shape._asdict().items() if value and name not in ("decode_live", "prefill_live")
    }


def noisy(cost: StepCost, shapes: list[Shape], scatter: float = 0.02) -> np.ndarray[Any, Any]:
    return np.array([cost.seconds(s) for s in shapes]) * np.exp(
        np.random.default_rng(1).normal(0, scatter, len(shapes))
    )


def test_an_engine_that_pads_contexts_is_found_and_predicts_longer_contexts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = steps_of(PADDED, {**LOG, "arrivals": {"kind": "poisson", "rate": 8.0}})
    assert max(shape.context for shape in shapes) > 2 * STEP
    rows = [{**row_of(shape), "seconds": float(t)} for shape, t in zip(shapes, noisy(PADDED, shapes))]
    profile = import_log(tmp_path, rows)
    assert "the engine reads cached tokens in multiples of 16,384" in capsys.readouterr().out
    assert profile.about["context_step"] == STEP
    longer = {**LOG, "lengths": {"prompt": [2500, 3500], "output": [100, 200]}}
    truth, ours = run_of(PADDED, longer).result(), run_of(PADDED, longer, profile=profile).result()
    assert ours["mean_tpot_ms"] == pytest.approx(truth["mean_tpot_ms"], rel=0.05)


def test_no_step_is_found_if_the_time_grows_with_every_token() -> None:
    plain = PartsCost(PREFILL, DecodePart(((1, 0.02), (64, 0.03)), context=1e-6), MixedPart(row=1e-5))
    shapes = steps_of(plain, {**LOG, "arrivals": {"kind": "poisson", "rate": 8.0}})
    for scatter in (0.0, 0.02, 0.2):
        assert find_context_step(Samples.from_shapes(shapes, noisy(plain, shapes, scatter))) == 0


def test_padded_contexts_are_simulated_as_step_by_step() -> None:
    fast, slow = run_of(PADDED, LOG), run_of(PADDED, LOG, every_step=True)
    assert fast.result()["makespan"] == slow.result()["makespan"]


def test_rows_that_grow_with_the_context_are_reported_and_other_contexts_are_outside(tmp_path: Path) -> None:
    cost = LinearCost(base=0.02, prefill_token=2e-5, decode_row=1e-4, context=1e-7)
    equal = {**LOG, "lengths": {"prompt": [800, 820], "output": [200, 220]}}
    shapes = steps_of(cost, equal)
    profile = import_log(tmp_path, [{**row_of(s), "seconds": float(t)} for s, t in zip(shapes, noisy(cost, shapes))])
    verdict = verdict_on(profile)
    assert verdict.grade == "usable"
    assert "rows and context grow together in the log" in verdict.text
    assert not any("per_row" in text for text in run_of(cost, equal, profile=profile).outside_profile)
    longer = {**LOG, "requests": 4, "lengths": {"prompt": [1500, 1500], "output": [10, 10]}}
    for every_step in (False, True):
        outside = run_of(cost, longer, every_step, profile).outside_profile
        assert any(text.startswith("context_per_row 15") for text in outside), outside


DRAFTED = PartsCost(
    PrefillPart(((1, 0.02), (2048, 0.3))), DecodePart(((1, 0.02), (16, 0.021)), context=1e-6, draft=1.3e-4),
    MixedPart(row=1e-4, context=1e-6),
)  # fmt: skip


def drafted_steps() -> list[Shape]:
    """The steps of a server whose drafter finds something in some rows."""
    rng = random.Random(5)
    shapes = [Shape(1, n, n, n * n) for n in (rng.randint(8, 600) for _ in range(40))]
    for number in range(400):
        rows = rng.randint(1, 16)
        tokens = rng.randint(8, 500) if number % 4 == 0 else 0
        context, drafts = rows * rng.randint(20, 400), sum(rng.choice((0, 1, 3)) for _ in range(rows))
        shapes.append(Shape(int(tokens > 0), tokens, tokens, tokens**2, 0, rows, rows, context, drafts=drafts))
    return shapes


def test_the_time_of_a_draft_is_found_exactly(tmp_path: Path) -> None:
    shapes = drafted_steps()
    profile = import_log(tmp_path, [{**row_of(s), "seconds": DRAFTED.seconds(s)} for s in shapes])
    assert isinstance(profile.cost, PartsCost)
    assert profile.cost.decodes.draft == pytest.approx(DRAFTED.decodes.draft, rel=0.01)
    for shape in shapes:
        assert profile.cost.seconds(shape) == pytest.approx(DRAFTED.seconds(shape), rel=0.01)
    assert profile.about["drafting"] == {"step": 0.0}  # the drafter is part of the steps: no time is added to them
    assert verdict_on(profile).findings == []
    again = fit_profile(tmp_path / "profile" / "samples.csv", {"device": "d"})
    assert isinstance(again.cost, PartsCost) and again.cost.decodes.draft == pytest.approx(1.3e-4, rel=0.01)


def test_a_fit_with_drafts_that_misses_the_total_times_is_written_with_a_warning() -> None:
    shapes = drafted_steps()
    groups = grouped(Samples.from_shapes(shapes, [1.122 * DRAFTED.seconds(shape) for shape in shapes]))
    check_fit(DRAFTED, groups, "here")
    with pytest.raises(BadInput, match=r"^here: the total time of the fitted .* expected at most 2%"):
        check_fit(DRAFTED, groups.select(groups.column("drafts") == 0), "here")
    errors = {"decode": 0.122, "mixed": 0.025, "prefill": 0.001}
    verdict = verdict_on(Profile("p", DRAFTED, {"total_error": errors, "error": {"decode": {"mean": 0.01}}}))
    assert verdict.grade == "for ranking only"
    assert [finding.text.partition(" from")[0] for finding in verdict.findings] == [
        "the total time of the fitted decode steps differs by +12.2%",
        "the total time of the fitted mixed steps differs by +2.5%",
    ]


def test_late_stamps_of_steps_in_flight_do_not_make_a_profile_useless(tmp_path: Path) -> None:
    """The host sees the ends of steps up to 95 % of a step late: single times are wrong, their sums are not."""
    cost = LinearCost(base=0.02, prefill_token=2e-5, decode_row=1e-4, context=1e-7)
    shapes = steps_of(cost, LOG)
    times = np.array([cost.seconds(shape) for shape in shapes])
    ends = np.cumsum(times) + np.random.default_rng(2).uniform(0, 0.95, len(times)) * times.min()
    starts = np.concatenate([[0.0, 0.001], ends[:-2] + 0.0005])
    rows = [{**row_of(s), "start": float(a), "end": float(b)} for s, a, b in zip(shapes, starts, ends)]
    profile = import_log(tmp_path, rows)
    assert max(error["mean"] for error in profile.about["error_of_single_steps"].values()) > 0.3
    assert verdict_on(profile).grade == "usable"
    other = {**LOG, "arrivals": {"kind": "poisson", "rate": 3.0}}
    truth, ours = run_of(cost, other).result(), run_of(cost, other, profile=profile).result()
    assert ours["mean_e2el_ms"] == pytest.approx(truth["mean_e2el_ms"], rel=0.03)

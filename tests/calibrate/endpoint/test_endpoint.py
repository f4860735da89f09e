"""Fit step costs to client-side token times. The simulator is a server with exact step times."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
from servesim.calibrate.client.load_generator import SentRequest
from servesim.calibrate.client.protocols import TextCompletions
from servesim.calibrate.endpoint.answers import LoadLine, LoadResult, loads_of
from servesim.calibrate.endpoint.fit import EndpointFit, fit_steps, profile_about, write_step_samples
from servesim.calibrate.endpoint.load_plan import Design, Point, ServerSpeed
from servesim.calibrate.endpoint.measure import Measurements, added_tokens, detect_api
from servesim.calibrate.endpoint.steps import busy_steps, observed_steps
from servesim.calibrate.probe.samples import read_samples
from servesim.core import BadInput, Request, Shape, StepCost
from servesim.costs.linear import LinearCost
from servesim.costs.parts import DecodePart, PartsCost, PrefillPart
from servesim.costs.uncertainty import with_parameters
from servesim.study.journal import Journal

from ..client.recording_server import recording_server
from .endpoints import simulate_load

COST = LinearCost(base=0.006, prefill=0.002, prefill_token=1e-4, decode_step=0.004, decode_live=8e-4, context=2e-6)
SMALL = Design(lengths=(16, 32, 64, 128, 256, 512), batches=(2, 4, 8), bursts=(2, 4), output=24, rounds=1)
SLOTS = {"name": "llm-serving", "decode_batch": 16}


def calibrate(cost: Any, policy: Any, engine: Any = None, front: float = 0.003, design: Design = SMALL) -> EndpointFit:
    loads = [simulate_load(point, design, cost, policy, engine or {}, front) for point in design.points()]
    return fit_steps(observed_steps(loads))


def assert_times(fit: EndpointFit, cost: StepCost, shapes: Iterable[Shape], error: float) -> None:
    for shape in shapes:
        assert fit.profile.cost.seconds(shape) == pytest.approx(cost.seconds(shape), rel=error), shape


def prompt(tokens: int, prompts: int = 1) -> Shape:
    return Shape(prompts, prompts * tokens, prompts * tokens, prompts * tokens**2)


def decode(rows: int, context: int) -> Shape:
    return Shape(decode_rows=rows, decode_live=rows, context=context)


STEPS = [prompt(16), prompt(100), prompt(512), decode(1, 60), decode(3, 200), decode(8, 900)]


def test_exact_step_times_give_exact_costs() -> None:
    fit = calibrate(COST, SLOTS)
    assert_times(fit, COST, STEPS, 3e-3)
    assert fit.front_end == pytest.approx(0.003, rel=1e-3)
    assert max(error["p90"] for error in fit.profile.error.values()) < 5e-3
    assert "prefill.row" in fit.profile.about["tied"]  # one prompt per step: row and step are the same


def test_mixed_steps_are_fitted() -> None:
    fit = calibrate(COST, {"name": "vllm-v1", "async_scheduling": False})
    mixed = Shape(1, 64, 64, 4096, 0, 8, 8, 1000)
    assert_times(fit, COST, [*STEPS, prompt(128, 2), mixed], 0.01)


def test_batched_prompts_show_the_cost_of_a_row() -> None:
    cost = LinearCost(base=0.008, prefill_row=0.003, prefill_token=1e-4, decode_live=1e-3)
    fit = calibrate(cost, "vllm")
    assert isinstance(fit.profile.cost, PartsCost)
    assert fit.profile.cost.prefill.row == pytest.approx(0.003, rel=0.01)
    assert_times(fit, cost, [*STEPS, prompt(64, 4)], 2e-3)


def test_attention_inside_prompts_is_fitted() -> None:
    cost = LinearCost(base=0.008, prefill_token=1e-4, prefill_square=2e-7, decode_live=1e-3)
    assert_times(calibrate(cost, SLOTS), cost, [prompt(16), prompt(128), prompt(512), decode(4, 200)], 1e-3)


def test_decode_costs_with_jumps_are_fitted() -> None:
    prefill = PrefillPart(((16, 0.01), (128, 0.012), (512, 0.06)))
    cost = PartsCost(prefill, DecodePart(((1, 0.01), (2, 0.011), (4, 0.03), (8, 0.031))))
    fit = calibrate(cost, SLOTS, design=Design(SMALL.lengths, (1, 2, 4, 8), (2, 4), 24, 1))
    assert_times(fit, cost, [prompt(16), prompt(128), *(decode(rows, 0) for rows in (1, 2, 4, 8))], 1e-3)


def test_a_server_with_few_slots_is_measured_up_to_its_slots() -> None:
    fit = calibrate(COST, {"name": "llm-serving", "decode_batch": 3})
    assert fit.profile.about["grid"]["decode_rows"] == [1, 3]
    assert_times(fit, COST, [decode(1, 60), decode(2, 100), decode(3, 200)], 3e-3)


def test_with_late_packets_true_costs_are_inside_the_intervals() -> None:
    """Packets are 1 ms late on average; steps take 10 ms or more. Intervals of two standard errors cover 95 %."""
    exact = [simulate_load(point, SMALL, COST, SLOTS, {}, 0.003) for point in SMALL.points()]
    inside = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        fit = fit_steps(observed_steps([delay_packets(load, number, rng) for number in range(3) for load in exact]))
        drawn = [with_parameters(fit.profile.cost, draw) for draw in fit.profile.uncertainty.draws]
        for shape in STEPS:
            width = 2 * np.std([cost.seconds(shape) for cost in drawn])
            inside.append(abs(fit.profile.cost.seconds(shape) - COST.seconds(shape)) <= width)
    assert sum(inside) >= 0.9 * len(inside)


def delay_packets(load: LoadResult, number: int, rng: np.random.Generator) -> LoadResult:
    """Return a load with late packets."""
    late = [np.array(s.times) + rng.exponential(1e-3, len(s.times)) for s in load.sent_requests]
    sent = [replace(s, times=np.maximum.accumulate(times).tolist()) for s, times in zip(load.sent_requests, late)]
    return LoadResult(load.point, number, sent)


def test_joined_tokens_do_not_hide_the_steps() -> None:
    """A server that joins tokens: 24 tokens arrive in 21 events or fewer, and only the total is known."""
    rng = np.random.default_rng(1)
    loads = [simulate_load(point, SMALL, COST, SLOTS, {}, 0.003) for point in SMALL.points()]
    joined = 0
    for load in loads:
        for sent in load.sent_requests:
            sent.output_tokens = len(sent.times)
            if len(sent.times) > 8:
                late = set(rng.choice(np.arange(1, len(sent.times) - 1), 3, replace=False).tolist())
                sent.times = [time for k, time in enumerate(sent.times) if k not in late]
                joined += 1
        assert load.failure is None
    assert joined > 30
    assert_times(fit_steps(observed_steps(loads)), COST, STEPS, 0.05)


def test_a_buffered_response_is_a_failed_load() -> None:
    load = simulate_load(Point("single", 1, 64), SMALL, COST, SLOTS, {}, 0.0)
    (sent,) = load.sent_requests
    sent.output_tokens, sent.times = len(sent.times), sent.times[:1]
    assert load.failure == "24 tokens arrived in 1 events: cannot separate the steps"


def test_sizes_without_steps_are_part_of_the_profile() -> None:
    """Batches of 4 and 8 failed. A server with three slots shows no larger steps either, but nothing was missed."""
    loads = [simulate_load(point, SMALL, COST, SLOTS, {}, 0.003) for point in SMALL.points()]
    for load in loads:
        if load.point.kind == "batch" and load.point.rows > 2:
            load.sent_requests[0].outcome = "broken"
    measured = Measurements(loads, SMALL.points())
    about = profile_about(fit_steps(observed_steps(measured.good)), measured)
    assert about["loads"]["missed"] == {"decode_rows": 8}
    assert about["grid"]["decode_rows"] == [1, 2]
    few = [simulate_load(point, SMALL, COST, {**SLOTS, "decode_batch": 3}, {}, 0.003) for point in SMALL.points()]
    measured = Measurements(few, SMALL.points())
    about = profile_about(fit_steps(observed_steps(measured.good)), measured)
    assert about["loads"]["missed"] == {} and about["grid"]["decode_rows"] == [1, 3]


def test_one_load_with_single_prompt_steps_is_enough_for_a_fit() -> None:
    policy = {"name": "llm-serving", "decode_batch": 16, "prefill_batch": 8}
    observed = observed_steps([simulate_load(point, SMALL, COST, policy, {}, 0.003) for point in SMALL.points()])
    single = [step for step in observed if step.kind == "prefill" and step.shape.prefill_rows == 1]
    kept = [step for step in observed if step not in single or step.point == single[0].point]
    assert_times(fit_steps(kept), COST, [prompt(64, 3), prompt(128, 3), decode(4, 200)], 0.05)


def test_tokens_that_arrive_together_are_flagged_samples(tmp_path: Path) -> None:
    """`sim calibrate check` reads the file again, and a step without time is not a sample of a step."""
    fit = calibrate(COST, SLOTS)
    fit.steps[0] = fit.steps[0]._replace(samples=(*fit.steps[0].samples, 0.0))
    write_step_samples(tmp_path / "samples.csv", fit)
    samples = read_samples(tmp_path / "samples.csv")
    assert len(samples) == sum(len(step.samples) for step in fit.steps)
    flagged = [(sample.seconds, sample.flagged) for sample in samples if not sample.good]
    assert flagged == [(0, "no time between tokens")]


def test_buffered_streams_of_a_busy_server_show_no_steps() -> None:
    load = simulate_load(Point("busy", 2, 32), SMALL, COST, SLOTS, {}, 0.003)
    assert busy_steps(load, 0.01)
    for sent in load.sent_requests:
        if sent.request.output > 1:
            sent.times = [sent.times[0]] + [sent.times[-1]] * (len(sent.times) - 1)
    assert busy_steps(load, 0.01) == []


def test_design_has_all_kinds_with_small_loads_first_and_within_its_limits() -> None:
    points = Design().points()
    assert [point.name for point in points[:4]] == ["single 1x16", "batch 2x32", "burst 2x32", "busy 1x32"]
    assert {point.kind for point in points} == {"single", "batch", "burst", "busy"}
    assert all(point.rows * point.prompt <= 2048 for point in points if point.kind == "burst")
    assert all(point.rows * (point.prompt + 32) <= 8192 for point in points if point.kind == "batch")
    assert len({point.name for point in points}) == len(points)
    for fields in ({"lengths": (0,)}, {"lengths": ()}, {"bursts": (1,)}, {"rounds": 0}):
        with pytest.raises(BadInput, match="expected"):
            Design(**fields)  # type: ignore[arg-type]


def test_answers_are_read_back_and_the_last_line_of_a_load_counts(tmp_path: Path) -> None:
    loads = [simulate_load(point, SMALL, COST, SLOTS, {}, 0.003) for point in SMALL.points()[:4]]
    lines = [load.record({"url": "u"}) for load in loads]
    with Journal(tmp_path / "answers.jsonl", LoadLine) as journal:
        journal.append([{**lines[0], "answers": []}, *lines])
    with Journal(tmp_path / "answers.jsonl", LoadLine) as journal:
        found = loads_of(journal.records)
    assert [load.record({"url": "u"}) for load in found] == lines
    assert observed_steps(found) == observed_steps(loads)
    (tmp_path / "answers.jsonl").write_text(json.dumps({**lines[0], "rows": "one"}) + "\n")
    with pytest.raises(BadInput, match=r"answers.jsonl:1: .*rows: expected a whole number of at least 0, got 'one'"):
        Journal(tmp_path / "answers.jsonl", LoadLine).__enter__()


@pytest.mark.parametrize(("added", "words"), [(1, 99), (0, 100), (None, 100)])
def test_a_text_prompt_is_shorter_by_the_tokens_that_the_server_adds(added: Optional[int], words: int) -> None:
    with recording_server(added, text_only=True) as server:
        client = detect_api(server.url, "openai", "m", 10.0, "seed")
        assert isinstance(client.api, TextCompletions)
        client.send([Request("x", 0.0, 100, 1)])
    assert len(server.prompts[-1]) == words


@pytest.mark.parametrize(("counted", "added"), [(None, 0), (15, 0), (16, 0), (18, 2), (80, 0)])
def test_only_a_small_difference_is_taken_as_added_tokens(counted: Optional[int], added: int) -> None:
    assert added_tokens(SentRequest(Request("x", 0.0, 16, 1), 0.0, prompt_tokens=counted)) == added


def test_the_default_lengths_fit_into_the_max_model_len_of_the_server() -> None:
    models = [{"id": "other", "max_model_len": 512}, {"id": "m", "max_model_len": 2048}]
    with recording_server(models=models) as server:
        assert detect_api(server.url, "openai", None, 10.0, "seed").max_length == 512
        client = detect_api(server.url, "openai", "m", 10.0, "seed")
    assert client.max_length == 2048
    design = Design().within(client.max_length, chosen=False)
    assert design.lengths == (16, 32, 64, 128, 256, 512, 1024, 2016)
    for point in design.points():
        requests = point.requests("seed", design.output, design.short_prompt, ServerSpeed())
        assert max(request.prompt + request.output for request in requests) <= 2048
    assert Design().within(None, chosen=False) == Design()
    assert Design().within(1000, chosen=False).lengths[-2:] == (512, 968)


def test_chosen_lengths_above_the_limit_of_the_server_are_an_error() -> None:
    assert Design(lengths=(16, 2016)).within(2048, chosen=True).lengths == (16, 2016)
    with pytest.raises(BadInput, match="expected at most 2048 tokens of prompt and output, the max_model_len"):
        Design(lengths=(16, 2048)).within(2048, chosen=True)
    with pytest.raises(BadInput, match="expected at most 64 tokens"):
        Design().within(64, chosen=False)

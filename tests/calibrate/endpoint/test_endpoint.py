"""Fitting a server's step costs to what its clients saw: a server that keeps perfect time is the simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

aiohttp = pytest.importorskip("aiohttp")
from servesim.calibrate.endpoint.answers import Taken, append, read, rows  # noqa: E402
from servesim.calibrate.endpoint.fit import EndpointFit, TooLittle, fit_steps  # noqa: E402
from servesim.calibrate.endpoint.load_plan import Design, Pace, Point, plain_words  # noqa: E402
from servesim.calibrate.endpoint.steps import slope, steps  # noqa: E402
from servesim.calibrate.server.word_tokenizer import tokens_of  # noqa: E402
from servesim.core import BadInput, Request, Shape  # noqa: E402
from servesim.costs.linear import LinearCost  # noqa: E402
from servesim.costs.table import TableCost  # noqa: E402

from .endpoints import simulated  # noqa: E402

COST = LinearCost(base=0.006, prefill=0.002, prefill_token=1e-4, decode_step=0.004, decode_live=8e-4, context=2e-6)
SMALL = Design(lengths=(16, 32, 64, 128, 256, 512), batches=(2, 4, 8), bursts=(2, 4), output=24, rounds=1)
SLOTS = {"name": "llm-serving", "decode_batch": 16}


def calibrated(cost: Any, policy: Any, engine: Any = None, front: float = 0.003, design: Design = SMALL) -> EndpointFit:
    loads = [simulated(point, design, cost, policy, engine or {}, front) for point in design.points()]
    return fit_steps(*steps(loads))


def test_costs_of_a_server_that_keeps_time_come_back_exactly() -> None:
    fit = calibrated(COST, SLOTS)
    assert fit.solved.form == "linear"
    assert fit.solved.values["prefill"] == pytest.approx(COST.base + COST.prefill, rel=1e-6)
    assert fit.solved.values["prefill_token"] == pytest.approx(COST.prefill_token, rel=1e-6)
    assert fit.solved.values["decode_step"] == pytest.approx(COST.base + COST.decode_step, rel=1e-3)
    assert fit.solved.values["decode_live"] == pytest.approx(COST.decode_live, rel=1e-2)
    assert fit.solved.values["context"] == pytest.approx(COST.context, rel=5e-2)
    assert fit.solved.values["front"] == pytest.approx(0.003, rel=1e-6)
    assert max(error["p90"] for error in fit.error.values()) < 1e-3
    assert fit.solved.blended == ("prefill_row",)  # one prompt a step: nobody can tell a row from a step


def test_a_server_that_mixes_prompts_and_decodes_shows_what_a_step_of_both_pays_only_once() -> None:
    fit = calibrated(COST, "vllm-v1")
    cost = fit.solved.cost
    assert isinstance(cost, LinearCost)
    assert cost.base == pytest.approx(COST.base, rel=0.02)
    assert cost.prefill + cost.prefill_row == pytest.approx(COST.prefill, rel=0.05)
    for shape in (
        Shape(2, 256, 256, 32768),
        Shape(1, 64, 64, 4096, 0, 8, 8, 1000),
        Shape(decode_live=6, decode_rows=6),
    ):
        assert cost.seconds(shape) == pytest.approx(COST.seconds(shape), rel=0.01)


def test_prompts_run_in_batches_show_what_a_row_costs() -> None:
    cost = LinearCost(base=0.008, prefill_row=0.003, prefill_token=1e-4, decode_live=1e-3)
    fit = calibrated(cost, "vllm")
    assert fit.solved.values["prefill_row"] == pytest.approx(0.003, rel=1e-3)
    assert fit.solved.values["prefill"] == pytest.approx(0.008, rel=1e-3)


def test_attention_inside_prompts_is_found_where_it_is() -> None:
    cost = LinearCost(base=0.008, prefill_token=1e-4, prefill_square=2e-7, decode_live=1e-3)
    fit = calibrated(cost, SLOTS)
    assert fit.solved.form == "squares"
    assert fit.solved.values["prefill_square"] == pytest.approx(2e-7, rel=1e-3)


def test_a_decode_that_jumps_between_batches_becomes_a_table() -> None:
    cost = TableCost([(16, 0.01), (128, 0.012), (512, 0.06)], [(1, 0.01), (2, 0.011), (4, 0.03), (8, 0.031)])
    fit = calibrated(cost, SLOTS, design=Design(SMALL.lengths, (1, 2, 4, 8), (2, 4), 24, 1))
    assert fit.solved.form == "table"
    for rows_, seconds in ((1, 0.01), (2, 0.011), (4, 0.03), (8, 0.031)):
        assert fit.solved.cost.decode(rows_, rows_, 0) == pytest.approx(seconds, rel=1e-3)
    assert fit.solved.cost.seconds(Shape(1, 128, 128)) == pytest.approx(0.012, rel=1e-3)


@pytest.mark.parametrize(("lag", "end_lag"), [(1, False), (7, True)])
def test_the_lags_of_a_busy_front_end_are_seen(lag: int, end_lag: bool) -> None:
    """llm-serving's: seven calls until a request is seen, and the end of a stream one call late."""
    engine = {"front_end": {"lag": lag, "end_lag": end_lag}}
    fit = calibrated(COST, SLOTS, engine, 0.0005, Design(SMALL.lengths, (2, 4, 8), (2, 4), 40, 1))
    assert fit.lag == lag
    assert fit.end_lag is end_lag
    assert fit.solved.values["prefill_token"] == pytest.approx(COST.prefill_token, rel=1e-6)


def test_a_server_of_few_slots_is_measured_with_the_rows_it_ran() -> None:
    fit = calibrated(COST, {"name": "llm-serving", "decode_batch": 3})
    assert fit.grid["decode_rows"] == [1, 3]
    assert fit.solved.values["decode_live"] == pytest.approx(COST.decode_live, rel=0.02)


def test_with_late_packets_true_costs_lie_inside_the_stated_intervals() -> None:
    """Packets come 1 ms late on average, on steps of 10 ms and more; intervals of two errors hold 95 % of the time."""
    truth = {"prefill": 0.008, "prefill_token": 1e-4, "decode_step": 0.01, "decode_live": 8e-4, "context": 2e-6}
    exact = [simulated(point, SMALL, COST, SLOTS, {}, 0.003) for point in SMALL.points()]
    inside = []
    for seed in range(10):
        chance = np.random.default_rng(seed)
        fit = fit_steps(*steps([blurred(load, number, chance) for number in range(3) for load in exact]))
        intervals = {name: fit.interval(name) for name in truth if name in fit.solved.values}
        inside += [low <= truth[name] <= high for name, (low, high) in intervals.items()]
    assert len(inside) >= 40
    assert sum(inside) >= 0.9 * len(inside)


def blurred(load: Taken, number: int, chance: np.random.Generator) -> Taken:
    """Return a load whose packets came late."""
    late = [np.array(s.times) + chance.exponential(1e-3, len(s.times)) for s in load.sendings]
    seen = [replace(s, times=np.maximum.accumulate(times).tolist()) for s, times in zip(load.sendings, late)]
    return Taken(load.point, number, 0.0, seen)


def test_without_a_load_that_went_well_there_is_no_fit_and_it_says_which() -> None:
    load = simulated(Point("burst", 4, 64), SMALL, COST, SLOTS, {}, 0.0)
    with pytest.raises(TooLittle, match="steady decoding could be timed went well: decode costs cannot be fitted"):
        fit_steps(*steps([load]))


def test_one_load_with_a_lone_prompt_is_enough_for_a_fit() -> None:
    """Without that load the table's prefill curve has no point, so the table cannot predict it."""
    policy = {"name": "llm-serving", "decode_batch": 16, "prefill_batch": 8}
    seen, late = steps([simulated(point, SMALL, COST, policy, {}, 0.003) for point in SMALL.points()])
    alone = [step for step in seen if step.kind == "prefill" and step.shape.prefill_rows == 1]
    kept = [step for step in seen if step not in alone or step.point == alone[0].point]
    fit = fit_steps(kept, late)
    assert fit.solved.form == "linear"
    assert fit.solved.values["prefill_token"] == pytest.approx(COST.prefill_token, rel=0.05)


def test_one_late_packet_does_not_change_what_a_step_took() -> None:
    ends = 0.01 * np.arange(12)
    ends[5] += 0.006
    assert slope(ends) == pytest.approx(0.01, rel=1e-9)


def test_the_design_has_every_kind_small_loads_first_and_within_its_bounds() -> None:
    points = Design().points()
    assert [point.name for point in points[:4]] == ["single 1x16", "batch 2x32", "burst 2x32", "busy 1x32"]
    assert {point.kind for point in points} == {"single", "batch", "burst", "busy"}
    assert all(point.rows * point.prompt <= 2048 for point in points if point.kind == "burst")
    assert all(point.rows * (point.prompt + 32) <= 8192 for point in points if point.kind == "batch")
    assert len({point.name for point in points}) == len(points)
    for given in ({"lengths": (0,)}, {"lengths": ()}, {"bursts": (1,)}, {"rounds": 0}):
        with pytest.raises(BadInput, match="expected"):
            Design(**given)  # type: ignore[arg-type]


def test_prompts_have_the_words_asked_for_and_no_two_begin_alike() -> None:
    requests = Point("burst", 8, 64).requests("salt", 32, 16, Pace())
    texts = [plain_words(request) for request in requests]
    assert {len(tokens_of(text, 32000)) for text in texts} == {64}
    assert len({tuple(text.split()[:16]) for text in texts}) == 8
    assert plain_words(requests[0]) == plain_words(Request(requests[0].id, 5.0, 64, 1))


def test_answers_are_written_as_seen_and_read_back_but_for_a_torn_load(tmp_path: Path) -> None:
    path = tmp_path / "answers.csv"
    loads = [simulated(point, SMALL, COST, SLOTS, {}, 0.003) for point in SMALL.points()[:4]]
    for load in loads:
        append(path, load)
    assert [rows(load) for load in read(path)] == [rows(load) for load in loads]
    text = path.read_text()
    path.write_text(text[: text.rindex("busy,1,32") + 50])
    assert [load.point.name for load in read(path)] == ["single 1x16", "batch 2x32", "burst 2x32"]
    path.write_text(text.replace("finished", "finished\nnonsense", 1))
    with pytest.raises(BadInput, match=r"answers.csv:2: not a row of such answers"):
        read(path)

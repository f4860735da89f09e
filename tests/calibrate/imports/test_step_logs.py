"""Step logs of engines: durations, shapes, and the profile fitted to them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from servesim.calibrate.imports.fit_steps import find_width, first_use_seconds, slow_steps, slower_than
from servesim.calibrate.imports.step_log import read_step_log
from servesim.calibrate.probe.sample_set import Samples
from servesim.cli import main
from servesim.config.scenario import scenario_from
from servesim.core import Request, Shape
from servesim.costs.derived import FirstUseCost
from servesim.costs.device_profile import Profile, load_profile
from servesim.costs.linear import LinearCost
from servesim.engine.server import Server
from servesim.engine.step import Step, batch
from servesim.runs.simulate import simulate

COST = LinearCost(base=0.02, prefill_token=2e-5, decode_row=1e-4, context=1e-7)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_batch_gives_the_shape_of_a_step(tmp_path: Path) -> None:
    batch = [["a", 1, 331, True], ["b", 100, 50, False], ["c", 20, 0, True], ["d", 1, 9, True], ["e", 1, 0, True]]
    rows = [{"scheduled_s": 1.0, "returned_s": 1.2, "batch": batch}]
    step = read_step_log(write_jsonl(tmp_path / "log.jsonl", rows))
    assert step.shapes == [Shape(3, 121, 121, 100**2 + 20**2 + 1, 100 * 50, 2, 2, 340)]
    assert step.seconds.tolist() == pytest.approx([0.2])


def test_a_step_lasts_until_the_next_one_starts_and_idle_time_is_not_counted(tmp_path: Path) -> None:
    """The host needs 1 ms between two steps. After the third step the engine waits for 5 s."""
    starts, ends = [0.0, 0.021, 0.042, 5.0, 5.021], [0.02, 0.041, 0.062, 5.02, 5.041]
    rows = [{"start": start, "end": end, "batch": [["a", 1, 5]]} for start, end in zip(starts, ends)]
    steps = read_step_log(write_jsonl(tmp_path / "log.jsonl", rows))
    assert steps.seconds.tolist() == pytest.approx([0.021] * 5)


def test_only_adjacent_steps_of_a_sample_have_a_duration(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text(
        "step,start,prefill_tokens,decode_rows,context\n"
        "10,1.000,0,3,300\n11,1.020,50,3,303\n20,2.000,0,4,500\n21,2.030,0,4,504\n22,2.061,0,0,0\n".replace(
            ",0,0,0\n", ",7,0,0\n"
        ),
        encoding="utf-8",
    )
    steps = read_step_log(log)
    # After step 21, a step without decodes starts: the engine may have waited for its prompt.
    assert steps.seconds.tolist() == pytest.approx([0.020, 0.030])
    assert steps.shapes == [Shape(0, 0, 0, 0, 0, 3, 3, 300), Shape(0, 0, 0, 0, 0, 4, 4, 500)]


@pytest.mark.parametrize(("unit", "scale"), [("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)])
def test_stamps_may_count_from_1970_in_any_unit(tmp_path: Path, unit: str, scale: int) -> None:
    starts = [1_790_000_000 * scale + k * scale * 25 // 1000 for k in range(4)]
    if unit == "s":
        starts = [1_790_000_000 + 0.025 * k for k in range(4)]
    rows = [{"start": start, "decode_rows": 1, "context": 9} for start in starts]
    steps = read_step_log(write_jsonl(tmp_path / "log.jsonl", rows), unit=unit)
    assert steps.seconds.tolist() == pytest.approx([0.025] * 3, rel=1e-4)


def test_steps_with_the_same_stamp_share_the_time_until_the_next_one(tmp_path: Path) -> None:
    """Stamps in whole milliseconds: steps of 0.4 ms. Leaving out those of 0 ms would make the others too slow."""
    rows = [{"start": 4 * k // 10, "decode_rows": 1, "context": k} for k in range(1001)]
    steps = read_step_log(write_jsonl(tmp_path / "log.jsonl", rows), unit="ms")
    assert len(steps) == 1000
    assert steps.seconds.sum() == pytest.approx(0.4)
    assert steps.seconds.max() == pytest.approx(0.5e-3)


def test_a_line_that_is_logged_twice_is_counted_once(tmp_path: Path) -> None:
    rows = [{"step": n, "start": 0.02 * n, "decode_rows": 1 + n, "context": 9} for n in (0, 1, 1, 2, 3)]
    steps = read_step_log(write_jsonl(tmp_path / "log.jsonl", rows))
    assert [shape.decode_rows for shape in steps.shapes] == [1, 2, 3]
    assert steps.seconds.tolist() == pytest.approx([0.02] * 3)


def test_with_asynchronous_scheduling_a_step_has_its_own_time_on_the_device(tmp_path: Path) -> None:
    """The engine decides a step when the last but one ends, 1 ms of host time later. The device runs one at a time."""
    truth = [0.030, 0.020, 0.050, 0.020, 0.024]
    ends = list(accumulate(truth, initial=0.002))[1:]
    starts = [0.002, 0.003, *(end + 0.001 for end in ends[:-2])]
    rows = [{"start": start, "end": end, "batch": [["a", 1, 5]]} for start, end in zip(starts, ends)]
    rows.append({"start": 9.0, "end": 9.01, "batch": [["b", 7, 0]]})  # after a pause without requests
    steps = read_step_log(write_jsonl(tmp_path / "log.jsonl", rows))
    assert steps.seconds.tolist() == pytest.approx([*truth, 0.01])


def test_a_recording_of_vllm_has_chunks_and_counts_and_may_end_in_the_middle_of_a_line(tmp_path: Path) -> None:
    rows = [
        {"header": {"engine": "vllm", "version": "0.32.0"}},
        {"step": 1, "start": 0.0, "end": 0.03, "batch": [["a", 40, 10]], "decode_rows": 3, "context": 70},
        {"step": 2, "start": 0.031, "end": 0.05, "batch": [], "decode_rows": 4, "context": 121},
    ]
    log = write_jsonl(tmp_path / "steps.jsonl", rows)
    with log.open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "start": 0.051, "ba')
    steps = read_step_log(log)
    assert steps.shapes == [
        Shape(1, 40, 40, 1600, 400, 3, 3, 70),
        Shape(decode_rows=4, decode_live=4, context=121),
    ]
    assert steps.seconds.tolist() == pytest.approx([0.031, 0.020])


def test_the_rows_may_be_a_json_list(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text('[{"seconds": 0.5, "decode_rows": 2}]', encoding="utf-8")
    steps = read_step_log(tmp_path / "log.json")
    assert (steps.shapes, steps.seconds.tolist()) == ([Shape(decode_rows=2, decode_live=2)], [0.5])


def test_counts_other_names_and_units(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("took,prefill_rows,prefill_tokens,prefill_cached,decode_rows\n21.5,2,100,60,0\n", encoding="utf-8")
    step = read_step_log(log, {"seconds": "took"}, "ms")
    assert step.seconds.tolist() == pytest.approx([0.0215])
    assert step.shapes == [Shape(2, 100, 100, 5000, 3000)]


FAULTY: list[str] = [
    '{"batch": [["a", 1, 5]]}',
    '{"start": 1, "batch": []}',
    '{"start": 1, "batch": [["a", 0, 5]]}',
    '{"start": 1, "end": 0.5, "batch": [["a", 1, 5]]}',
    '{"start": 2, "batch": [["a", 1, 5]]}\n{"start": 1, "batch": [["a", 1, 6]]}',
    '{"start": "x", "batch": [["a", 1, 5]]}',
    '{"start": 1, "batch": [["a", 1, 5]]}',
    '{"start": 1}',
    "start,prefill_tokens,prefill_rows\n1,3,5\n",
    "[1]",
    "[{]",
]


def test_a_faulty_log_is_one_line(tmp_path: Path, expected_errors: Callable[..., None]) -> None:
    def read(text: str) -> None:
        (tmp_path / "log").write_text(text + "\n", encoding="utf-8")
        read_step_log(tmp_path / "log")

    expected_errors("step_logs", read, FAULTY)


def test_samples_of_one_shape_are_one_point(tmp_path: Path) -> None:
    rows = [{"seconds": 0.02 + 0.001 * k, "decode_rows": 1 + k % 2, "context": 10} for k in range(4)]
    steps = read_step_log(write_jsonl(tmp_path / "log.jsonl", rows))
    assert steps.points.tolist() == [0, 1, 0, 1]
    assert set(steps.kinds.tolist()) == {"decode"}


def test_the_first_step_of_a_bucket_takes_longer(tmp_path: Path) -> None:
    cost = FirstUseCost(COST, 64, 0.5)
    decode = Shape(decode_rows=3, decode_live=3, context=90)
    assert cost.linear_in_context(3, 3) is None
    assert cost.duration(decode) == COST.duration(decode) + 0.5
    assert cost.duration(decode) == COST.duration(decode)
    assert cost.linear_in_context(3, 3) == COST.linear_in_context(3, 3)
    assert cost.seconds(Shape(1, 61, 61, 3721, 0, 3, 3, 90)) < 0.5  # 64 tokens: the same bucket
    assert cost.seconds(Shape(1, 62, 62, 3844, 0, 3, 3, 90)) > 0.5


def test_every_run_pays_for_new_shapes_and_hold_does_not_change_it() -> None:
    tree = {
        "workload": {
            "requests": 60,
            "arrivals": {"kind": "poisson", "rate": 8},
            "lengths": {"prompt": [20, 300], "output": 30},
        },
        "policy": {"name": "vllm-v1"},
    }
    profile = Profile("x", COST, {"first_use": {"tokens": 64, "seconds": 0.4}})
    plain = simulate(scenario_from(tree), profile=Profile("x", COST))
    runs = [simulate(scenario_from(tree), profile=profile, hold=flag) for flag in (True, True, False)]
    ends = [[r.finish for r in run.requests] for run in runs]
    assert ends[0] == ends[1] == ends[2]
    assert runs[0].measures.ttft.mean() > plain.measures.ttft.mean() + 0.1
    warm = simulate(scenario_from({**tree, "engine": {"start": "warm"}}), profile=profile)
    assert [r.finish for r in warm.requests] == [r.finish for r in plain.requests]


def foreign_log(folder: Path, first_use: float) -> Path:
    """Write the step log of an engine that prepares new shapes, and return it."""
    tree = {
        "workload": {
            "requests": 150,
            "arrivals": {"kind": "poisson", "rate": 8},
            "lengths": {"prompt": [20, 700], "output": [10, 60]},
        },
        "policy": {"name": "vllm-v1", "max_num_batched_tokens": 1024, "async_scheduling": False},
    }
    profile = Profile("x", COST, {"first_use": {"tokens": 64, "seconds": first_use}})
    log = InMemorySteps()
    simulate(scenario_from(tree), profile=profile, observers=(log,), hold=False)
    return write_jsonl(folder / "steps.jsonl", log.rows)


class InMemorySteps:
    """Records the steps of a simulation as an engine would log them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.batch: list[list[Any]] = []

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        cached = {request.id: request.cached for request in server.running}
        self.batch = [[str(id), tokens, cached[id], True] for id, tokens in batch(list(server.running), step)]
        self.start = server.view.now

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        if self.batch:
            self.rows.append({"start": self.start, "end": now, "batch": self.batch})


def test_a_foreign_log_is_imported_fitted_and_simulated_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = foreign_log(tmp_path, 0.3)
    assert find_width(read_step_log(log)) == 64
    assert main(["calibrate", "import", "steps", str(log), "-o", str(tmp_path / "out")]) == 0
    assert "steps prepared new shapes: 0.3 s per 64 tokens" in capsys.readouterr().out
    profile = load_profile(tmp_path / "out")
    assert profile.about["first_use"]["seconds"] == pytest.approx(0.3, rel=0.05)
    mixed = Shape(1, 300, 300, 90_000, 0, 8, 8, 2000)
    for shape in (mixed, Shape(decode_rows=8, decode_live=8, context=2000)):
        assert profile.cost.duration(shape) == pytest.approx(COST.duration(shape), rel=0.05)


def test_steady_steps_have_no_first_uses(tmp_path: Path) -> None:
    assert find_width(read_step_log(foreign_log(tmp_path, 0.0))) == 0


def test_slow_first_steps_are_found_and_their_time_is_known() -> None:
    shapes = [Shape(1, tokens, tokens, tokens**2) for tokens in (10, 20, 30, 100, 110, 120, 10, 100, 40, 50)]
    seconds = [COST.duration(shape) for shape in shapes]
    seconds[0] += 0.3
    seconds[3] += 0.3
    seconds[7] += 0.1  # the same bucket again
    steps = Samples.from_shapes(shapes, seconds)
    assert slow_steps(steps, 64).tolist() == [k in (0, 3, 7) for k in range(10)]
    assert slower_than(COST, steps).tolist() == [k in (0, 3, 7) for k in range(10)]
    assert first_use_seconds(steps, 64, COST, slow_steps(steps, 64)) == pytest.approx(0.7 / 2)


@pytest.mark.parametrize("scatter", [0.3, 0.5, 1.0])
def test_steps_that_only_scatter_have_no_first_uses(scatter: float) -> None:
    rng = random.Random(1)
    shapes = [Shape(1, tokens, tokens, tokens**2) for tokens in (rng.randint(20, 900) for _ in range(500))]
    seconds = [COST.duration(shape) * rng.lognormvariate(0, scatter) for shape in shapes]
    assert find_width(Samples.from_shapes(shapes, seconds)) == 0


def test_a_bucket_may_be_prepared_again_or_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fit without the first steps tells which steps were slow. Their time is not part of the step times."""
    rows, rng, seen = [], random.Random(2), set()
    for number in range(400):
        tokens = rng.randint(20, 900) if number % 2 else 0
        shape = Shape(*((1, tokens, tokens, tokens**2, 0) if tokens else (0,) * 5), 8, 8, 2000 + number)
        key = (-(-(tokens + 8) // 64), number >= 200)  # after 200 steps, contexts need other buffers
        slow = 0.2 if key not in seen and key != (8, False) else 0.0
        seen.add(key)
        seconds = COST.duration(shape) + slow
        rows.append({"seconds": seconds, "prefill_tokens": tokens, "decode_rows": 8, "context": shape.context})
    log = write_jsonl(tmp_path / "log.jsonl", rows)
    assert main(["calibrate", "import", "steps", str(log), "-o", str(tmp_path / "out")]) == 0
    assert f"{len(seen) - 1} steps prepared new shapes" in capsys.readouterr().out
    profile = load_profile(tmp_path / "out")
    lost = profile.about["first_use"]["seconds"] * len({bucket for bucket, _ in seen})
    assert lost == pytest.approx(0.2 * (len(seen) - 1), rel=0.02)
    mixed = Shape(1, 700, 700, 490_000, 0, 8, 8, 2100)
    assert profile.cost.duration(mixed) == pytest.approx(COST.duration(mixed), rel=0.01)


def test_a_log_without_contexts_counts_their_time_once(tmp_path: Path) -> None:
    """The time of the contexts is part of the rows. An assumed time per cached token would add it again."""
    rng, rows = random.Random(3), []
    for number in range(300):
        tokens, decoding = (rng.randint(20, 900) if number % 3 == 0 else 0), rng.randint(1, 30)
        shape = Shape(*((1, tokens, tokens, tokens**2, 0) if tokens else (0,) * 5), decoding, decoding, 400 * decoding)
        seconds = COST.duration(shape) * rng.lognormvariate(0, 0.02)
        rows.append({"seconds": seconds, "prefill_tokens": tokens, "decode_rows": decoding})
    log = write_jsonl(tmp_path / "log.jsonl", rows)
    assert main(["calibrate", "import", "steps", str(log), "-o", str(tmp_path / "out")]) == 0
    profile = load_profile(tmp_path / "out")
    assert "0: no sample has a context" in profile.about["tied"]["decode.context"]
    decodes = Shape(decode_rows=20, decode_live=20, context=20 * 400)
    assert profile.cost.duration(decodes) == pytest.approx(COST.duration(decodes), rel=0.03)

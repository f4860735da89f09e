"""The workload of the contest: arrivals like its client's, lengths like its data set's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from servesim.core import BadInput
from servesim.traces.describe import gap_variation
from servesim.traces.make.arrivals import contest_arrivals
from servesim.traces.make.contest import contest
from servesim.traces.read.formats import load

LENGTHS = Path("data") / "contest" / "contest_alpaca5010_lengths.csv.gz"

ROUNDED = {0.5: 2.0, 2: 0.5, 3: 0.33, 6: 0.17, 1.5: 0.67, 15: 0.07, 16: 0.06, 30: 0.03, 60: 0.02, 100: 0.01, 150: 0.01}


@pytest.mark.parametrize(("X", "interval"), ROUNDED.items())
def test_gaps_are_whole_milliseconds_with_mean_one_over_x_rounded_to_hundredths(X: float, interval: float) -> None:
    gaps = np.diff(contest_arrivals(20_000, X, seed=1))
    milliseconds = gaps * 1000
    assert np.abs(milliseconds - np.rint(milliseconds)).max() < 1e-6
    # The count of milliseconds is Poisson: its variance is its mean.
    assert gaps.mean() == pytest.approx(interval, rel=4 * (interval * 1000) ** -0.5 / 20_000**0.5)
    assert milliseconds.var() == pytest.approx(interval * 1000, rel=0.06)


@pytest.mark.parametrize(("X", "cv"), [(0.5, 0.022), (2, 0.045), (10, 0.10), (67, 0.316)])
def test_the_variation_of_gaps_matches_the_published_value(X: float, cv: float) -> None:
    assert gap_variation(contest_arrivals(50_000, X, seed=2)) == pytest.approx(cv, rel=0.03)


def test_above_200_per_second_all_requests_arrive_at_once() -> None:
    assert contest(201, 7.5).arrivals.max() == 0.0


def test_x_times_t_requests_are_sent_rounded_down() -> None:
    assert len(contest(0.5, 3000)) == 1500
    assert len(contest(1.5, 3)) == 4
    with pytest.raises(BadInput, match=r"contest: X\*T: expected at least one request"):
        contest(0.1, 5)


def test_send_overhead_makes_every_gap_longer() -> None:
    plain, real = contest(5, 300, seed=4), contest(5, 300, seed=4, send_overhead=0.0032)
    assert np.diff(real.arrivals) - np.diff(plain.arrivals) == pytest.approx(0.0032)
    assert np.diff(real.arrivals).mean() == pytest.approx(0.2032, abs=0.001)  # 203.2 ms were measured


def test_arrivals_and_lengths_have_one_seed_but_separate_random_streams() -> None:
    slow, fast = contest(0.5, 3000, seed=5), contest(2, 750, seed=5)
    assert (slow.prompts == fast.prompts).all()
    assert (slow.outputs == fast.outputs).all()
    assert (contest(0.5, 3000, seed=6).prompts != slow.prompts).any()


def test_seed_0_has_the_send_times_of_the_recorded_tables(shared: Path) -> None:
    for X, T in ((0.5, 3000), (2, 750), (150, 10)):
        recorded = load(shared / "data" / "contest" / f"contest_X{X}_T{T}.csv.gz")
        made = contest(X, T, seed=0, lengths=shared / LENGTHS)
        assert (made.arrivals == recorded.arrivals).all()
        assert (made.prompts == recorded.prompts).all()
        assert [request.limit for request in made.requests] == [request.limit for request in recorded.requests]


def test_seed_0_has_fixed_send_times() -> None:
    """numpy's RandomState(0).poisson(500) gives 503, 507, 495 and 496 ms, in every version of numpy."""
    assert contest(2, 2.5, seed=0).arrivals.tolist() == pytest.approx([0.0, 0.503, 1.010, 1.505, 2.001])


def test_exact_lengths_have_the_published_statistics(shared: Path) -> None:
    trace = contest(0.5, 3000, lengths=shared / LENGTHS)
    # With the begin-of-sequence token: one more than the published 19.95 / 16 / 34 / 78 / 192.
    assert trace.prompts.mean() == pytest.approx(20.95, abs=0.001)
    assert trace.prompts.var(ddof=1) == pytest.approx(214.2315, rel=1e-3)
    assert trace.prompts.sum() == 31_425
    assert [int(np.quantile(trace.prompts, q)) for q in (0.5, 0.9, 0.99, 1.0)] == [17, 35, 79, 193]
    assert trace.outputs.mean() == pytest.approx(65.390667, abs=1e-6)
    assert trace.outputs.var(ddof=1) == pytest.approx(4070.314046, rel=1e-3)
    assert trace.outputs.sum() == 98_086
    assert [int(np.quantile(trace.outputs, q)) for q in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1, 46, 144, 294, 504]
    assert (trace.prompts + trace.outputs).max() == 512
    twice = contest(2, 5010, lengths=shared / LENGTHS)
    assert len(twice) == 10_020
    assert (twice.prompts[5010:] == twice.prompts[:5010]).all()
    columns = np.genfromtxt(shared / LENGTHS, delimiter=",", skip_header=1, dtype=int)
    empty = np.flatnonzero(columns[:, 2] == 0)
    assert len(empty) == 2
    assert [(twice.requests[i].output, twice.requests[i].limit) for i in empty] == [(300, 300)] * 2


def test_the_data_set_repeats_and_an_empty_output_means_the_default_limit(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("idx,prompt_tokens,output_tokens\n0,12,40\n1,9,0\n2,30,5\n")
    trace = contest(2, 2.5, lengths=tmp_path / "lengths.csv")
    assert trace.prompts.tolist() == [12, 9, 30, 12, 9]
    assert [(r.output, r.limit) for r in trace.requests] == [(40, 40), (300, 300), (5, 5), (40, 40), (300, 300)]


def test_random_lengths_match_the_real_distribution() -> None:
    for seed in range(5):
        trace = contest(0.5, 3000, seed=seed)
        assert trace.prompts.sum() == pytest.approx(31_425, rel=0.01)
        assert trace.outputs.sum() == pytest.approx(98_086, rel=0.02)
        assert np.quantile(trace.outputs, [0.25, 0.5, 0.75, 0.9, 0.99]) == pytest.approx(
            [15, 46, 100, 144, 294], rel=0.1
        )
        assert np.quantile(trace.prompts, [0.5, 0.95, 0.99]) == pytest.approx([17, 45, 79], rel=0.1)
        # Short prompts have long outputs: rank correlation -0.24 in the real data set.
        ranks = [values.argsort(kind="stable").argsort() for values in (trace.prompts, trace.outputs)]
        assert np.corrcoef(*ranks)[0, 1] == pytest.approx(-0.24, abs=0.06)
        assert (trace.prompts + trace.outputs).max() <= 512
        assert trace.outputs.min() >= 1


def test_a_tokenizer_gives_the_lengths_of_the_data_set(tmp_path: Path) -> None:
    records = [
        {"instruction": "Name three colours", "input": "", "output": "red green blue"},
        {"instruction": "Translate", "input": "guten Tag", "output": ""},
    ]
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps(records))
    trace = contest(1, 3, lengths=path, tokenizer=lambda text: len(text.replace(":", " ").split()))
    # One more token per prompt. Without an output to measure, the client sets no limit: 300.
    assert [(r.prompt, r.output) for r in trace.requests] == [(4, 3), (4, 300), (4, 3)]
    with pytest.raises(BadInput, match="holds text; set `tokenizer`"):
        contest(1, 3, lengths=path)

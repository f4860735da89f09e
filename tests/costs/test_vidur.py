"""Vidur's step costs and scheduler: our results match the rows that Vidur computes, with restarts."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest
from servesim.calibrate.imports.cost_tables import import_vidur
from servesim.config.registry import make_policy, preset
from servesim.core import BadInput, Request, Shape
from servesim.costs.device_profile import load_profile
from servesim.costs.imported_tables import VidurCost, load_vidur
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock

SMALL = VidurCost([0, 1, 1, 1, 1, 1, 1, 1, 2], [0] * 9, [[0, 0], [0, 8], [0, 16]], [[0, *range(1, 9)], [9] * 9], 1000)


def run(requests: list[Request], cost: VidurCost, blocks: int) -> float:
    """Run requests with Vidur's policy and return the time when the last one ends."""
    policy = make_policy(preset("vidur")["policy"])
    return Loop(Server(policy, blocks, 16), Inbox(requests), SimulatedClock(cost)).run()


ROWS = [("rows_vllm", 7424, 0, 1212.99815), ("rows_vllm_tight1500", 1500, 3555, 1306.7637199085345)]


@pytest.mark.slow
def test_every_row_of_vidur_is_reproduced(shared: Path) -> None:
    folder = shared / "data" / "bench" / "vidur-a800"
    cost = load_vidur(folder / "tables.npz")
    for name, blocks, restarts, makespan in ROWS:
        with gzip.open(folder / f"{name}.csv.gz", "rt") as file:
            rows = list(csv.DictReader(file))
        requests = [Request(row["id"], float(row["arrival"]), int(row["prompt"]), int(row["output"])) for row in rows]
        assert run(requests, cost, blocks) == pytest.approx(makespan, abs=1e-5)
        assert sum(request.preemptions for request in requests) == restarts
        check_rows(requests, rows)


def check_rows(requests: list[Request], rows: list[dict[str, str]]) -> None:
    """Assert that every request has Vidur's times and restarts."""
    for request, row in zip(requests, rows):
        assert request.preemptions == int(row["restarts"])
        assert request.scheduled == pytest.approx(float(row["first_scheduled"]), rel=0, abs=1e-5)
        assert request.first_token == pytest.approx(float(row["first_token"]), rel=0, abs=1e-5)
        assert request.finish == pytest.approx(float(row["completed"]), rel=0, abs=1e-5)


def test_step_times_come_from_the_tables() -> None:
    """Two prompts of 3 tokens cost like one of 4.24: 2 + 4 s. A decode of both takes 2 + 16 s, of one 2 + 8 s."""
    requests = [Request("a", 0.0, 3, 3), Request("b", 0.0, 3, 2)]
    assert run(requests, SMALL, 100) == 6 + 18 + 10
    assert [(r.scheduled, r.first_token, r.finish) for r in requests] == [(0.0, 6.0, 34.0), (0.0, 6.0, 24.0)]


def test_an_imported_profile_has_the_same_costs(tmp_path: Path) -> None:
    tokens, rows = np.arange(4097.0), np.arange(129.0)
    tables = {
        "comp_ms_per_layer": 0.1 + tokens / 1000,
        "kvsave_ms_per_layer": tokens / 10_000,
        "attn_decode_ms_per_layer": np.outer(rows, np.arange(65)) / 1000,
        "attn_prefill_ms_per_layer": np.tile(tokens / 500, (65, 1)),
    }
    np.savez(tmp_path / "tables.npz", layers=32, **tables)
    cost = import_vidur(tmp_path / "tables.npz", tmp_path / "made-up")
    profile = load_profile(tmp_path / "made-up")
    assert profile.name == "made-up"
    shape = Shape(2, 300, 300, 100**2 + 200**2, 0)
    assert profile.cost.seconds(shape) == cost.seconds(shape) > 0
    assert profile.cost.decode(8, 8, 4000) == cost.decode(8, 8, 4000) > 0
    assert profile.outside_range({"decode_rows": 128, "prefill_tokens": 4096}) == []
    assert profile.outside_range({"decode_rows": 129}) == ["decode_rows 129 (measured 1 to 128)"]
    with pytest.raises(BadInput, match="already holds a profile"):
        import_vidur(tmp_path / "tables.npz", tmp_path / "made-up")


def test_tokens_and_context_are_rounded_up() -> None:
    assert SMALL.decode(1, 1, 0) == 2 + 8  # 1 token as 8, a context of 1 as 64
    assert SMALL.decode(2, 2, 2 * 63) == 2 + 16  # a mean of 64 with the token being computed
    assert SMALL.decode(2, 2, 2 * 64) == 2 + 32  # 65 as 128, after the end of the table: extrapolated


def test_prompts_of_a_step_cost_like_one_with_the_same_sum_of_squares() -> None:
    assert SMALL.seconds(Shape(2, 7, 7, 3**2 + 4**2, 0)) == 2 + 5
    assert SMALL.seconds(Shape(1, 3, 3, 3**2, 3 * 10, 2, 2, 20)) == 2 + 9 + 16  # 10 cached tokens, two decodes

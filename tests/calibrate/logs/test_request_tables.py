"""Tables of request times: columns, units, order, and rows that cannot be right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servesim.calibrate.logs.observed_runs import runs_from
from servesim.calibrate.logs.timestamps import RequestTimes, read_times


def read(folder: Path, text: str) -> RequestTimes:
    path = folder / "log.csv"
    path.write_text(text, encoding="utf-8")
    return read_times(path)


@pytest.mark.parametrize(
    "text",
    [
        "idx,arrival_s,ttft_s,e2e_s\n0,0.0,1.0,2.0\n1,0.5,0.25,4.0\n",
        "arrival,ttft,e2el\n0.0,1.0,2.0\n0.5,0.25,4.0\n",
        "arrival_ms,ttft_ms,e2e_ms\n0,1000,2000\n500,250,4000\n",
        " arrival , ttft_ms ,latency\n0.0,1000,2.0\n0.5,250,4.0\n",
        "arrival,first_token,finish\n0.0,1.0,2.0\n0.5,0.75,4.5\n",
        "arrival,first_token,finish,ttft\n0.0,1.0,2.0,9\n0.5,0.75,4.5,9\n",  # a latency without the other is not used
        "arrival,first_token,finish,latency\n0.0,1.0,2.0,9\n0.5,0.75,4.5,9\n",
        "arrival,ttft,e2e\n0.5,0.25,4.0\n0.0,1.0,2.0\n",
        "arrival,first_token,finish\n0.5,0.75,4.5\n0.0,1.0,2.0\n",
        "index,arrival,ttft,e2e\n1,0.5,0.25,4.0\n0,0.0,1.0,2.0\n",
    ],
    ids=["seconds", "short names", "ms", "mixed", "absolute", "only ttft", "only e2e", "unsorted", "unsorted absolute",
         "unsorted index"],
)  # fmt: skip
def test_the_same_requests_in_other_tables(text: str, tmp_path: Path) -> None:
    times = read(tmp_path, text)
    order = np.argsort(times.request_index)
    assert times.request_index[order].tolist() == [0, 1]
    assert times.arrivals == {0: 0.0, 1: 0.5}
    assert times.ttft[order].tolist() == [1.0, 0.25]
    assert times.e2e[order].tolist() == [2.0, 4.0]


def test_a_table_without_send_times_keeps_its_order(tmp_path: Path) -> None:
    times = read(tmp_path, "ttft_s,e2e_s\n3,4\n,\n1,2\n")
    assert (times.request_index.tolist(), times.ttft.tolist(), times.arrivals) == ([0, 2], [3.0, 1.0], {})


def test_rounded_columns_of_one_request_are_accepted(tmp_path: Path) -> None:
    times = read(tmp_path, "arrival,first_token,finish\n1.004,1.0,1.0\n")
    assert (times.ttft.tolist(), times.e2e.tolist()) == ([0.0], [0.0])


WRONG_TABLES: list[str] = [
    "arrival,ttft_s\n0,1\n",
    "first_token,finish\n1,2\n",
    "ttft_s,e2e_s\n",
    "",
    "ttft_s,e2e_s\n,\n",
    "ttft_s,e2e_s\n1,x\n",
    "ttft_s,e2e_s\n1,2\nnan,2\n",
    "arrival,ttft_s,e2e_s\n0,1,2\n,1,2\n",
    "idx,ttft_s,e2e_s\n0,1,2\n-1,1,2\n",
    "idx,ttft_s,e2e_s\n0.5,1,2\n",
    "idx,ttft_s,e2e_s\n1e30,1,2\n",
    "idx,ttft_s,e2e_s\n7,1,2\n7,1,2\n",
    "ttft_s,e2e_s\n-1,2\n",
    "ttft_s,e2e_s\n3,2\n",
    "arrival,first_token,finish\n5,1,2\n",
]


def test_a_table_that_cannot_be_right_is_one_line(tmp_path: Path, expected_errors: Callable[..., None]) -> None:
    expected_errors("request_tables", lambda text: read(tmp_path, text), WRONG_TABLES)


def test_an_unfinished_request_keeps_its_send_time(tmp_path: Path) -> None:
    """The log has times of day, so the trace of the same file starts at another time."""
    rows = "idx,arrival_s,prompt_tokens,output_tokens,ttft_s,e2e_s\n0,1700000000,9,5,,\n1,1700000002,9,5,1,3\n"
    (tmp_path / "log.csv").write_text(rows, encoding="utf-8")
    run: dict[str, Any] = {"name": "a", "log": "log.csv"}
    [observed] = runs_from({"cost": {"base": 1}, "free": ["base"], "runs": [run]}, "runs", tmp_path).runs
    assert observed.sent_times().tolist() == [2.0]
    assert (observed.first.tolist(), observed.end.tolist(), observed.makespan) == ([3.0], [5.0], 5.0)

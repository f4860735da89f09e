"""Columns of a trace for several answers: reading, errors, writing, scaling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import servesim
from servesim.core import BadInput, Sampling
from servesim.frames.inputs import requests_in
from servesim.traces.edit import scale
from servesim.traces.export import export
from servesim.traces.read.formats import load

CSV = """arrival_s,prompt_tokens,output_tokens,n,best_of,beam_width,sequence_tokens,beam_parents
0,10,5,,,,,
1,10,5,2,,,,
2,10,5,1,3,,"[5, 2, 4]",
3,10,3,1,,2,,"[[0, 0], [1, 1], []]"
4,10,5,1,1,,,
"""
SAMPLINGS = [
    None,
    Sampling(2),
    Sampling(1, 3, outputs=(5, 2, 4)),
    Sampling(1, 2, True, parents=[[0, 0], [1, 1], []]),
    None,
]


@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl"])
def test_columns_are_read_and_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "first.csv").write_text(CSV)
    trace = load(tmp_path / "first.csv")
    assert [request.sampling for request in trace.requests] == SAMPLINGS
    export(trace, tmp_path / name)
    assert [request.sampling for request in load(tmp_path / name).requests] == SAMPLINGS
    assert (
        export(trace, tmp_path / "m.jsonl", "mooncake")[-1]
        == "this format cannot hold the several answers of 3 requests"
    )


def test_scaled_outputs_scale_all_sequences_and_forget_recorded_beams(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(CSV)
    requests = scale(load(tmp_path / "trace.csv"), output=2.0).requests
    assert requests[2].sampling == Sampling(1, 3, outputs=(10, 4, 8))
    assert requests[3].sampling == Sampling(1, 2, True)


def written(folder: Path, cells: str) -> Path:
    (folder / "trace.csv").write_text(f"{CSV.splitlines()[0]}\n0,10,5,,,,,\n1,10,5,{cells}\n")
    return folder / "trace.csv"


WRONG_SAMPLING_CELLS: Any = [
    "0,,,,",
    "3,2,,,",
    "1,2000,,,",
    "3,,2,,",
    "1,3,2,,",
    '2,,,"[5]",',
    '2,,,"[4, 4]",',
    '2,,,"[5",',
    '1,,2,,"[[0, 1]]"',
    '2,,,,"[[0]]"',
]


def test_a_wrong_cell_is_one_line_with_its_row(tmp_path: Path, expected_errors: Callable[..., None]) -> None:
    expected_errors("sampling_cells", lambda cells: load(written(tmp_path, cells)), WRONG_SAMPLING_CELLS)


def test_a_frame_keeps_several_answers(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(CSV)
    frame = servesim.load(tmp_path / "trace.csv")
    assert frame["sampling"].tolist() == SAMPLINGS
    assert [request.sampling for request in requests_in(frame).requests] == SAMPLINGS
    with pytest.raises(BadInput, match="column sampling: expected Sampling objects"):
        requests_in(frame.assign(sampling=2))

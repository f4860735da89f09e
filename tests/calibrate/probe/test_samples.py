"""The table of measured steps: samples.csv, steps.csv, and the errors for invalid rows."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from servesim.calibrate.imports.step_log import read_step_log
from servesim.calibrate.probe.samples import SAMPLE_FILES, measured_points, read_samples, samples_file
from servesim.core import BadInput, Shape
from servesim.files.step_table import ModelCall, read_calls, read_steps, write_calls

HEADER = "load,kind,point,seconds,host_seconds,flagged," + ",".join(Shape._fields[:-2]) + ",failed\n"
DECODE = "a,decode,3,{},,{},0,0,0,0,0,4,4,400,0,{}\n"
TEXT = HEADER + DECODE.format(0.5, "", "") + DECODE.format(9, "outlier", "") + DECODE.format("", "", "out of memory")


def write_samples(folder: Path, text: str) -> Path:
    path = folder / "samples.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_are_typed_and_other_columns_are_kept(tmp_path: Path) -> None:
    rows = read_samples(write_samples(tmp_path, TEXT))
    assert [row.good for row in rows] == [True, False, False]
    assert [row.seconds for row in rows] == [0.5, 9.0, None]
    assert {row.shape for row in rows} == {Shape(decode_rows=4, decode_live=4, context=400)}
    assert (rows[0].kind, rows[0].point, rows[0].cells["load"]) == ("decode", 3, "a")
    assert (rows[1].flagged, rows[2].failed) == ("outlier", "out of memory")


def test_a_column_of_the_user_may_have_the_name_that_another_tool_uses(tmp_path: Path) -> None:
    [row] = read_samples(write_samples(tmp_path, "timestamp,id,seconds,decode_rows\n10:30,x,0.5,4\n"))
    assert (row.start, row.number, row.cells["timestamp"]) == (None, 2, "10:30")


def test_rows_of_one_point_are_grouped(tmp_path: Path) -> None:
    write_samples(tmp_path, TEXT + DECODE.format(0.7, "", "").replace("decode,3", "busy,3"))
    decode, busy = measured_points(tmp_path)
    assert (decode.kind, decode.seconds, decode.flagged, decode.failed) == ("decode", [0.5], 1, "out of memory")
    assert (busy.kind, busy.median, busy.name) == ("busy", 0.7, "4 rows of context 100")


def test_the_file_may_be_compressed_or_missing(tmp_path: Path) -> None:
    assert samples_file(None) is None
    assert samples_file(tmp_path) is None
    assert measured_points(tmp_path) == []
    packed = tmp_path / SAMPLE_FILES[1]
    packed.write_bytes(gzip.compress(TEXT.encode()))
    assert samples_file(tmp_path) == packed
    plain = write_samples(tmp_path, TEXT)
    assert samples_file(tmp_path) == plain
    assert read_samples(plain) == read_samples(packed)


SHAPE = "0,0,0,0,0,4,4,400,0"
BAD_ROWS: dict[str, str] = {
    "short": "a,decode,3",
    "long": f"a,decode,3,1,,,{SHAPE},,1",
    "no number": f"a,decode,3,fast,,,{SHAPE},",
    "no seconds": f"a,decode,3,,,,{SHAPE},",
    "no time": f"a,decode,3,0,,,{SHAPE},",
    "negative": f"a,decode,3,-0.5,,,{SHAPE},",
    "nan": f"a,decode,3,nan,,,{SHAPE},",
    "host": f"a,decode,3,1,-1,,{SHAPE},",
    "point": f"a,decode,x,1,,,{SHAPE},",
    "rows": "a,decode,3,1,,,0,0,0,0,0,4,-4,400,0,",
    "kind": f"a,decod,3,1,,,{SHAPE},",
    "kind of another shape": "a,decode,3,1,,,1,16,16,256,0,2,2,100,0,",
    "nothing": "a,swap,3,1,,,0,0,0,0,0,0,0,0,0,",
}


def test_a_row_that_cannot_be_right_is_one_line_with_its_number(
    tmp_path: Path, expected_errors: Callable[..., None]
) -> None:
    expected_errors("samples", lambda row: read_samples(write_samples(tmp_path, f"{TEXT}{row}\n")), BAD_ROWS)
    with pytest.raises(BadInput, match=r"samples.csv: row 1: expected the column seconds, got 'start,decode_rows'"):
        read_samples(write_samples(tmp_path, "start,decode_rows\n0,4\n"))


def test_kind_point_and_parts_of_the_shape_have_defaults(tmp_path: Path) -> None:
    text = "seconds,prefill_rows,prefill_tokens,prefill_cached,decode_rows,context\n"
    rows = read_samples(write_samples(tmp_path, text + "0.5,2,100,60,4,400\n0.2,,,,4,400\n0.6,2,100,60,4,400\n"))
    mixed = Shape(2, 100, 100, 5000, 3000, 4, 4, 400)
    assert [row.shape for row in rows] == [mixed, Shape(decode_rows=4, decode_live=4, context=400), mixed]
    assert [(row.kind, row.point) for row in rows] == [("mixed", 1), ("decode", 0), ("mixed", 1)]


def test_live_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    shapes = [Shape(1, 16, 16, 256, 0, 2, 2, 100), Shape(swapped=3), Shape(2, 0, 0, 0, 0)]  # the last: padding only
    calls = [ModelCall(k + 0.25, k + 0.5, k + 1.0, shape) for k, shape in enumerate(shapes)]
    write_calls(calls, tmp_path / "steps.csv")
    assert read_calls(tmp_path / "steps.csv") == calls
    assert [step.number for step in read_steps(tmp_path / "steps.csv")] == [0, 1, 2]
    assert read_step_log(tmp_path / "steps.csv").shapes == shapes


def test_host_time_is_in_addition_to_the_seconds(tmp_path: Path) -> None:
    row = DECODE.format(0.5, "", "").replace("0.5,,", "0.5,0.01,")
    path = write_samples(tmp_path, HEADER + row)
    assert read_samples(path)[0].host == 0.01
    assert measured_points(tmp_path)[0].seconds == [0.51]


def test_resume_skips_a_truncated_last_row(tmp_path: Path) -> None:
    whole = read_samples(write_samples(tmp_path, TEXT))
    for length in (len(TEXT) - 20, len(TEXT) - 15, len(TEXT)):
        path = write_samples(tmp_path, TEXT[:length])
        assert read_samples(path, resume=True) == whole[: 2 + (length == len(TEXT))]
    with pytest.raises(BadInput, match=r"samples.csv: row 4: expected 16 columns"):
        read_samples(write_samples(tmp_path, TEXT[:-30] + "\n" + DECODE), resume=True)


def test_reading_samples_needs_no_numpy() -> None:
    code = "import servesim.calibrate.probe.samples, servesim.files.step_table, sys; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

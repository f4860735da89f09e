"""Reading samples.csv: the file, its rows, and the errors for invalid rows."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pytest
from servesim.calibrate.probe.samples import SAMPLE_FILES, holds_steps, measured_points, read_samples, samples_file
from servesim.core import BadInput, Shape

HEADER = "load,kind,point,seconds,host_seconds,flagged," + ",".join(Shape._fields) + ",failed\n"
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
    assert (rows[0].kind, rows[0].point, rows[0].fields["load"]) == ("decode", 3, "a")
    assert (rows[1].flagged, rows[2].failed) == ("outlier", "out of memory")


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
    assert holds_steps(packed)
    plain = write_samples(tmp_path, TEXT)
    assert samples_file(tmp_path) == plain
    assert read_samples(plain) == read_samples(packed)


def test_a_file_of_reported_totals_holds_no_steps(tmp_path: Path) -> None:
    assert not holds_steps(write_samples(tmp_path, "batch,milliseconds\n1,35\n"))


MIXED_SHAPE = "1,16,16,256,0,2,2,100,0"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,decode,3,0,,,0,0,0,0,0,4,4,400,0,", r"samples.csv: row 2: seconds: expected more than 0, got '0'"),
        ("a,decode,3,-0.5,,,0,0,0,0,0,4,4,400,0,", r"samples.csv: row 2: seconds: expected more than 0, got '-0.5'"),
        (
            "a,decode,3,nan,,,0,0,0,0,0,4,4,400,0,",
            r"samples.csv: row 2: seconds: expected a number from -1e\+06 to 1e\+06, got 'nan'",
        ),
        (
            "a,decode,3,1,-1,,0,0,0,0,0,4,4,400,0,",
            r"samples.csv: row 2: host_seconds: expected a number from 0 to 1e\+06",
        ),
        (
            "a,decode,x,1,,,0,0,0,0,0,4,4,400,0,",
            r"samples.csv: row 2: point: expected a whole number from 0 to 1e\+12, got 'x'",
        ),
        ("a,decode,3,1,,,0,0,0,0,0,4,-4,400,0,", r"samples.csv: row 2: decode_live: expected a whole number from 0"),
        (
            "a,decod,3,1,,,0,0,0,0,0,4,4,400,0,",
            r"samples.csv: row 2: kind: expected one of prefill, decode, mixed, swap",
        ),
        (
            f"a,decode,3,1,,,{MIXED_SHAPE},",
            r"samples.csv: row 2: kind: decode does not match the shape, which is mixed",
        ),
        ("a,swap,3,1,,,0,0,0,0,0,0,0,0,0,", r"samples.csv: row 2: kind: swap does not match the shape, which is empty"),
    ],
)
def test_error_for_an_impossible_sample_names_the_column(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_samples(write_samples(tmp_path, HEADER + row + "\n"))


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
    code = "import servesim.calibrate.probe.samples, sys; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

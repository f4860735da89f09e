"""Writing of files under real limits of the system: one-line errors, the old file stays, nothing else remains."""

from __future__ import annotations

import csv
import gzip
import io
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servesim.core import BadInput
from servesim.files.csv_columns import write_columns
from servesim.files.csv_rows import mark_formula, read_csv, unmark_formula
from servesim.files.write import append, open_text, replacing, write_json, write_rows, write_text

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
from pathlib import Path
from servesim.core import BadInput
from servesim.files.write import *
from servesim.files.write import append, replacing
path, long = Path(sys.argv[1]), "0123456789abcdef" * 1000
try:
    {code}
except BadInput as error:
    print(error)
"""


@pytest.mark.parametrize(
    "code",
    [
        "write_text(path, long)",
        "write_text(path, long[:10_001])",
        "write_json(path, [long])",
        "with replacing(path) as part: part.write_text(long)",
        "append(path, long)",
        "with open_text(path) as file: [file.write(long[:10]) for _ in range(2000)]",
    ],
)
def test_a_file_size_limit_leaves_the_old_file(tmp_path: Path, code: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old\n")
    done = subprocess.run([sys.executable, "-c", LIMITED.format(code=code), path], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{path}: cannot be written: File too large\n", "")
    assert path.read_text() == "old\n"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_gzipped_file_over_the_limit_leaves_nothing(tmp_path: Path) -> None:
    code = "import random; write_text(path, random.randbytes(40_000).hex())"
    path = tmp_path / "a.gz"
    done = subprocess.run([sys.executable, "-c", LIMITED.format(code=code), path], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{path}: cannot be written: File too large\n", "")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_device_is_one_line() -> None:
    for write in (lambda: write_text("/dev/full", "a"), lambda: append("/dev/full", "a\n")):
        with pytest.raises(BadInput, match=r"^/dev/full: cannot be written: No space left on device$"):
            write()
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_an_error_in_the_block_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), open_text(path) as file:
        file.write(f"new {1 // 0}")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_an_error_of_something_else_in_the_block_is_not_renamed(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError), open_text(tmp_path / "a"):
        raise ConnectionResetError


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "file/below", "folder", "\ud800"])
def test_an_unusable_name_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput) as caught:
        write_text(tmp_path / name, "text")
    assert str(caught.value).isprintable()
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_a_name_of_the_greatest_length_is_written(tmp_path: Path) -> None:
    write_text(tmp_path / ("x" * 250 + ".json"), "{}")
    write_text(tmp_path / ("x." + "y" * 250), "{}")


def test_a_link_and_the_permissions_are_kept(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "target").chmod(0o640)
    (tmp_path / "link").symlink_to("target")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o640


def test_a_pipe_gets_the_text(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_text(tmp_path / "pipe", "text")
    reader.join(30)
    assert got == ["text"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_file_can_be_kept_from_overwriting(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "first", overwrite=False)
    with pytest.raises(BadInput, match="exists already and is not overwritten"):
        write_text(tmp_path / "a", "second", overwrite=False)
    with pytest.raises(BadInput, match="exists already"), open_text(tmp_path / "b", overwrite=False):
        (tmp_path / "b").write_text("of another process")
    assert [(tmp_path / name).read_text() for name in sorted(os.listdir(tmp_path))] == ["first", "of another process"]


def test_two_writers_of_a_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    with open_text(tmp_path / "a") as first:
        first.write("first")
        with open_text(tmp_path / "a") as second:
            second.write("second")
        assert (tmp_path / "a").read_text() == "second"
    assert (tmp_path / "a").read_text() == "first"
    assert os.listdir(tmp_path) == ["a"]


def test_a_library_writes_to_a_name_with_the_same_suffix(tmp_path: Path) -> None:
    with replacing(tmp_path / "a.svg") as part:
        assert part.suffix == ".svg"
        part.write_text("svg")
    assert os.listdir(tmp_path) == ["a.svg"]


def test_equal_texts_give_equal_gzip_bytes(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        write_text(tmp_path / name, "text")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == b"text"


def test_a_text_outside_unicode_is_written(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "caf\udce9")
    write_json(tmp_path / "b", {"caf\udce9": 1})
    append(tmp_path / "a", "\ud800\n")
    assert (tmp_path / "a").read_bytes() == b"caf\\udce9\\ud800\n"


CELLS = ["=1+1", "+cmd", "-x", "@SUM(A1)", "'=1", "''-a", "'text'", "-5", "+1.5e3", "-inf", "'-5", "", "a=1", "'"]


def test_formula_cells_are_marked_and_read_back(tmp_path: Path) -> None:
    with open_text(tmp_path / "a.csv") as file:
        write_rows(file, [["text", "number"]], ([text, -5.5] for text in CELLS))
    assert [row["text"] for row in read_csv(tmp_path / "a.csv")] == CELLS
    cells: list[Any] = list(csv.reader(io.StringIO((tmp_path / "a.csv").read_text())))
    assert [row[0] for row in cells[1:5]] == ["'=1+1", "'+cmd", "'-x", "'@SUM(A1)"]
    assert {row[1] for row in cells[1:]} == {"-5.5"}
    assert all(unmark_formula(mark_formula(mark_formula(cell))) == mark_formula(cell) for cell in CELLS)


numbers = st.none() | st.integers() | st.floats()
names = st.none() | st.sampled_from(CELLS) | st.text(",\"' \r\n;=-+a1é\0", max_size=4)
kinds_of_columns = st.sampled_from([st.integers(), st.floats(), numbers, names, numbers | names | st.booleans()])


@given(st.data(), st.integers(0, 8), st.lists(kinds_of_columns, min_size=2, max_size=5))
def test_columns_are_written_as_rows_are(data: st.DataObject, length: int, kinds: list[Any]) -> None:
    columns = [data.draw(st.lists(kind, min_size=length, max_size=length)) for kind in kinds]
    by_rows, by_columns = io.StringIO(newline=""), io.StringIO(newline="")
    try:
        write_rows(by_rows, zip(*columns))
    except csv.Error:  # some versions of Python refuse a zero byte
        with pytest.raises(csv.Error):
            write_columns(by_columns, columns)
        return
    write_columns(by_columns, columns)
    assert by_columns.getvalue() == by_rows.getvalue()

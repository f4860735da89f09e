"""Reading of text, JSON and CSV files: every fault is one line, and no file takes forever."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servesim.cli import main
from servesim.core import BadInput
from servesim.files import read
from servesim.files.csv_rows import read_csv
from servesim.files.read import parse_json, quote, read_json, read_text
from servesim.traces.read.formats import load


def error_of(function: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(BadInput) as caught:
        function(*args, **options)
    message = str(caught.value)
    assert message.isprintable()  # one line
    assert len(message) < 400
    return message


def bomb(levels: int = 40) -> list[Any]:
    """A value of 10**levels items."""
    value: list[Any] = ["lol"]
    for _ in range(levels):
        value = [value] * 10
    return value


@pytest.mark.parametrize("wrap", [bomb, lambda: {"a": {"b": bomb()}}, lambda: (bomb(), 1), lambda: "x" * 10**7])
def test_a_huge_value_is_quoted_at_once(wrap: Any) -> None:
    assert len(quote(wrap())) == 48  # to write them all would never end


@pytest.mark.parametrize(
    "value", [1, "a", "it's", None, [], {}, (), (1,), [1, "b"], {"a": [1, {"b": 2}]}, (1, 2), b"x", 1.5, True, {1}]
)
def test_a_small_value_is_quoted_like_repr(value: Any) -> None:
    assert quote(value) == repr(value)


def test_a_value_that_contains_itself_or_a_huge_number_is_quoted() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert quote(loop) == "[[[[[...]]]]]"
    assert quote(10**5000) == "a huge int"


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "missing", "a/b/c", "\udc80"])
def test_an_unusable_name_is_one_line(name: str) -> None:
    error_of(read_text, name)


def test_a_device_and_a_pipe_are_refused_at_once(tmp_path: Path) -> None:
    assert error_of(read_text, "/dev/zero") == "/dev/zero: expected a file, got a device"
    os.mkfifo(tmp_path / "pipe")
    assert error_of(read_text, tmp_path / "pipe").endswith(": expected a file, got a pipe")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "a").chmod(0)
    assert error_of(read_text, tmp_path / "a").endswith("cannot be read: Permission denied")


def test_a_gzip_bomb_and_a_large_file_stop_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "SMALL_BYTES", 2**20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"0" * 2**23))
    assert error_of(read_text, tmp_path / "bomb.gz").endswith("unpacks to at most 1 MiB, got more")
    (tmp_path / "large").write_bytes(b"0" * (2**20 + 1))
    assert error_of(read_text, tmp_path / "large", limit=2**20).endswith("expected at most 1 MiB, got more")
    assert len(read_text(tmp_path / "large")) == 2**20 + 1


def written(folder: Path, text: str) -> Path:
    (folder / "a.csv").write_text(text)
    return folder / "a.csv"


WRONG_JSON: Any = ["NaN", "[-Infinity]", "1" * 400, "1" * 6000, "[1e999]", "[" * 100_000, '{"id": "\\ud800"}', "{"]


def test_bad_json_is_one_line(tmp_path: Path, expected_errors: Callable[..., None]) -> None:
    expected_errors("json", lambda text: read_json(written(tmp_path, text)), WRONG_JSON)


def test_unusual_but_valid_json_is_read(tmp_path: Path) -> None:
    text = '["' + "1" * 400 + '", 1e300, 1E+2, "\\ud83d\\ude00", 123456789012345678901]'
    (tmp_path / "a.json").write_text(text)
    assert (
        parse_json("x", text)
        == read_json(tmp_path / "a.json")
        == ["1" * 400, 1e300, 100.0, "\U0001f600", 123456789012345678901]
    )


def test_a_csv_file_is_read_plain_and_gzipped(tmp_path: Path) -> None:
    text = 'a,b\n1,"x,\ny"\n\n2,' + "z" * 200_000 + "\n3,'=1\n4,'quoted'\n"
    (tmp_path / "a.csv").write_text(text)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
    expected = [("1", "x,\ny"), ("2", "z" * 200_000), ("3", "=1"), ("4", "'quoted'")]
    for name in ("a.csv", "a.csv.gz"):
        assert [tuple(row.cells.values()) for row in read_csv(tmp_path / name, ("b", "a"))] == expected


WRONG_CSV: Any = ["a\n1\n", "a,b\n1,2\n\n1\n", "a,b\n1,2,3\n", "a,b,a\n1,2,3\n", "a,b\n1,\0\n", 'a,b\n1,2\n1,"2', "\n"]


def test_a_bad_csv_file_is_one_line_with_the_row(tmp_path: Path, expected_errors: Callable[..., None]) -> None:
    expected_errors("csv", lambda text: read_csv(written(tmp_path, text), ("a", "b")), WRONG_CSV)


def test_a_pipe_as_a_trace_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(["trace", "inspect", str(tmp_path / "pipe")]) == 2
    assert capsys.readouterr().err == f"sim: {tmp_path / 'pipe'}: expected a file, got a pipe\n"


def test_a_pipe_that_the_shell_opened_is_read_once() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"arrival,prompt,output\n0,5,6\n")
    os.close(writing)
    try:
        assert [(r.prompt, r.output) for r in load(f"/dev/fd/{reading}").requests] == [(5, 6)]
    finally:
        os.close(reading)

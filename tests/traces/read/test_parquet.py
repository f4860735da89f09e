"""Traces in Parquet: same requests as from CSV or JSON, and one-line errors for damaged files."""

from __future__ import annotations

import csv
import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402
from servesim.cli import main  # noqa: E402
from servesim.core.request import CLIENT_FIELDS  # noqa: E402
from servesim.traces.read.formats import load  # noqa: E402

Rows = list[dict[str, Any]]

START = datetime(2023, 11, 16, 18, 15, 46, 680590)
SERVESIM: Rows = [
    {"id": "a", "arrival_s": 0.5, "prompt_tokens": 40, "output_tokens": 7, "session_id": "x", "follows": None},
    {"id": "b", "arrival_s": 1.25, "prompt_tokens": 9, "output_tokens": 1, "session_id": None, "follows": "a"},
]
VIDUR: Rows = [{"arrived_at": 0.25 * i, "num_prefill_tokens": 10 + i, "num_decode_tokens": 5} for i in range(4)]
MOONCAKE: Rows = [
    {"timestamp": 3052 * i, "input_length": 1000 + i, "output_length": 52, "hash_ids": [0, i]} for i in range(3)
]
AZURE: Rows = [
    {"TIMESTAMP": START + timedelta(microseconds=123456 * i), "ContextTokens": 374 + i, "GeneratedTokens": 44}
    for i in range(3)
]


def write_parquet(rows: Rows, folder: Path) -> Path:
    path = folder / "trace.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def client_fields(path: Path) -> tuple[str, list[dict[str, Any]]]:
    trace = load(path)
    return trace.format, [{name: getattr(request, name) for name in CLIENT_FIELDS} for request in trace.requests]


@pytest.mark.parametrize("rows", [SERVESIM, VIDUR, AZURE], ids=["servesim", "vidur", "azure"])
def test_a_parquet_table_gives_the_same_requests_as_csv(rows: Rows, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert client_fields(write_parquet(rows, tmp_path)) == client_fields(path)


def test_parquet_objects_give_the_same_requests_as_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    assert client_fields(write_parquet(MOONCAKE, tmp_path)) == client_fields(path)
    assert client_fields(path)[0] == "mooncake"


def test_a_damaged_file_gives_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_parquet(VIDUR, tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    assert main(["trace", "inspect", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sim: {path}: row 1: damaged Parquet file: ")
    assert error.count("\n") == 1

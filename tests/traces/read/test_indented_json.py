"""JSON traces are read in any layout: lines, an indented list, and indented objects one after the other."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from servesim.traces.read.formats import load

from .test_formats import SAMPLES, count_words, triples, write

ROWS = [{"timestamp": 1000 * k, "input_length": 10 + k, "output_length": 3, "hash_ids": [k]} for k in range(3)]
JSON_SAMPLES = {name: sample for name, sample in SAMPLES.items() if sample[1].lstrip().startswith(("{", "["))}


def values(text: str) -> list[Any]:
    """Return the JSON values of a text."""
    return json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("format", JSON_SAMPLES)
def test_every_json_format_is_read_if_it_is_indented(tmp_path: Path, format: str) -> None:
    name, text, expected = JSON_SAMPLES[format]
    listed = json.dumps(values(text), indent=2)
    objects = "\n".join(json.dumps(value, indent="\t") for value in values(text))
    for layout in (listed, objects):
        trace = load(write(tmp_path, layout, name), format, tokenizer=count_words)
        assert triples(trace) == expected


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS[0], indent=1),
        json.dumps(ROWS[0]).replace(", ", "\n, "),
        "\n\n" + json.dumps(ROWS[0]).replace("}", "\n}\n\n"),
        json.dumps([ROWS[0]], indent=None, separators=(",\n", ":\n")),
        json.dumps(ROWS[0], indent=4).replace("\n", "\r\n"),
    ],
    ids=["indented", "comma first", "last brace on its own line", "list", "Windows line ends"],
)
def test_one_object_is_read_in_every_layout(tmp_path: Path, text: str) -> None:
    assert triples(load(write(tmp_path, text))) == [(0.0, 10, 3)]


def test_many_indented_objects_are_read_in_linear_time(tmp_path: Path) -> None:
    row = json.dumps(ROWS[0], indent=1) + "\n"
    start = time.process_time()
    assert len(load(write(tmp_path, row * 20_000))) == 20_000
    assert time.process_time() - start < 20  # a quadratic reader needs minutes

"""Damage files in the ways in which users, editors and full disks do: deleted, cut, changed or replaced values."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

VALUES: tuple[Any, ...] = (
    None, "x", "", [], [1], {}, {"a": {"b": [None]}}, -1, 0, 1e308, float("nan"), True, 2**70, "a\nb", 0.5,
)  # fmt: skip
CELLS = ("", "x", "-1", "0", "1e308", "nan", "inf", "1.5", "9" * 30, "=1+1", "a\nb", "٣")


def damage(path: Path, rng: random.Random) -> str:
    """Damage one file; return what was done."""
    ways: list[Callable[[Path, random.Random], str]] = [remove, empty, cut, flip, folder, binary]
    ways += [values] * 14
    return rng.choice(ways)(path, rng)


def remove(path: Path, rng: random.Random) -> str:
    path.unlink()
    return "removed"


def empty(path: Path, rng: random.Random) -> str:
    path.write_bytes(b"")
    return "empty"


def cut(path: Path, rng: random.Random) -> str:
    data = path.read_bytes()
    size = rng.randrange(len(data))
    path.write_bytes(data[:size])
    return f"cut to {size} bytes"


def flip(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    position = rng.randrange(len(data))
    data[position] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return f"byte {position} changed"


def folder(path: Path, rng: random.Random) -> str:
    path.unlink()
    path.mkdir()
    return "a folder"


def binary(path: Path, rng: random.Random) -> str:
    path.write_bytes(rng.randbytes(200))
    return "random bytes"


def values(path: Path, rng: random.Random) -> str:
    """Change one value, key, cell or line."""
    data = path.read_bytes()
    packed = path.suffix == ".gz"
    name = path.name.removesuffix(".gz")
    if name.endswith(".npz"):
        return tables(path, rng)
    text = (gzip.decompress(data) if packed else data).decode()
    if name.endswith(".csv"):
        text, what = change_table(text, rng)
    elif name.endswith(".yaml"):
        tree, what = change_tree(yaml.safe_load(text), rng)
        text = yaml.safe_dump(tree, sort_keys=False)
    elif name.endswith((".jsonl", ".journal")):
        lines = text.splitlines()
        number = rng.randrange(len(lines))
        tree, what = change_tree(json.loads(lines[number]), rng)
        lines[number : number + 1] = rng.choice([[json.dumps(tree)]] * 6 + [[], [lines[number]] * 2])
        text = "\n".join(lines) + "\n"
    else:
        tree, what = change_tree(json.loads(text), rng)
        text = json.dumps(tree)
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if packed else text.encode())
    return what


def change_tree(tree: Any, rng: random.Random) -> tuple[Any, str]:
    """Replace a value at a random depth, remove its key, or rename it."""
    if not isinstance(tree, (dict, list)) or not tree or rng.random() < 0.12:
        value = rng.choice(VALUES)
        return value, f"= {value!r}"
    key = rng.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
    copy: Any = dict(tree) if isinstance(tree, dict) else list(tree)
    action = rng.random()
    if action < 0.15:
        del copy[key]
        return copy, f"{key!r} removed"
    if action < 0.2 and isinstance(copy, dict):
        copy[f"{key}\n2"] = copy.pop(key)
        return copy, f"{key!r} renamed"
    copy[key], what = change_tree(tree[key], rng)
    return copy, f"{key!r}: {what}"


def change_table(text: str, rng: random.Random) -> tuple[str, str]:
    """Replace a cell or a name of a column, remove a cell, or repeat or remove a row."""
    rows = list(csv.reader(io.StringIO(text)))
    number = 0 if rng.random() < 0.1 else rng.randrange(len(rows))
    column = rng.randrange(len(rows[number]))
    action, cell = rng.random(), rng.choice(CELLS)
    what = f"row {number + 1}, {rows[0][column]} = {cell!r}"
    if action < 0.8:
        rows[number][column] = cell
    elif action < 0.9:
        del rows[number][column]
        what = f"row {number + 1}, {rows[0][column]} removed"
    else:
        rows[number : number + 1] = rng.choice([[], [rows[number]] * 2])
        what = f"row {number + 1} removed or repeated"
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue(), what


def tables(path: Path, rng: random.Random) -> str:
    """Change one array of an .npz file."""
    import numpy as np

    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    name = rng.choice(list(arrays))
    shape = rng.choice([(), (0,), (1,), (3,), (0, 4), (3, 3)])
    arrays[name] = np.full(shape, rng.choice([-1.0, 0.0, 1e308, np.nan, 2.0]))
    if rng.random() < 0.3:
        del arrays[name]
    np.savez(path, **arrays)
    return f"{name}: {shape}"


def copy_folder(source: Path, target: Path) -> Path:
    """Replace a folder by a copy of another."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target

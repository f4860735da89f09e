"""Mutations of input files for fuzz.py: changed bytes, changed values of JSON, YAML and CSV, damaged files.

A mutation draws everything from a `random.Random`, so the same seed gives the same file.
"""

from __future__ import annotations

import copy
import csv
import gzip
import io
import json
import random
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import yaml

Mutation = Callable[[bytes, random.Random], bytes]
Path = tuple[Any, ...]  # keys and indices from the root of a tree to a value

DEPTH, DIGITS = 3000, 5000
# Numbers are small or above every limit: a number just below a limit is valid, but its run takes very long.
ALIASES = ", ".join(f"&a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 12))
# Texts that are written into JSON and YAML unquoted, because no library writes them.
RAW_JSON = ("NaN", "Infinity", "-Infinity", "1e999", "9" * DIGITS, "[" * DEPTH + "]" * DEPTH, '{"a":' * DEPTH, "1.5.2")
RAW_YAML = (
    ".nan", ".inf", "-.inf", "1e999", "9" * DIGITS, "[" * DEPTH + "]" * DEPTH, f"[&a0 [x, x], {ALIASES}]",
    "&self [*self]", "!!python/object/apply:os.getcwd []", "!!binary x", "2024-01-01", "{? [a, b] : c}", "0x1F",
    "*none",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, "", "text", "a\nb", "a\tb\x1b[31m", "../../x", "/", "nan", "-inf", "1e3", "=1+1", "@x", "-1+1",
    "x" * 3000, "\ud800", "\u202e", [], {}, [[]], [1, "a", None], {"a": 1}, {"": None}, 0, -1, 1, 2, 7, 1.5, -0.0,
    1e-308, 1e308, -1e308, 2**31, 2**53 + 1, 2**63, -(2**63), 10**400, 1e13, 50,
)  # fmt: skip
CELLS = (
    "", " ", "text", "nan", "inf", "-inf", "-1", "0", "1", "1.5", "1e308", "1e400", "-1e308", "9" * DIGITS, "0x10",
    "1_000",
    "\u0663", "=1+1", "@x", '"', "a\nb", "../../x", "2024-01-01 00:00:00", "{}", "[1, 2]", "x" * 2000, "\ud800",
    str(10**400),
    "1e13", "9223372036854775808",
)  # fmt: skip
MARK = "fuzz-raw-{}-value"  # stands for the raw text number N until the file is text


def mutate(name: str, data: bytes, rng: random.Random) -> bytes:
    """Return the content of a file with one to three mutations."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        structured = structure_mutation(name)
        if structured is not None and rng.random() < 0.75:
            data = structured(data, rng)
        else:
            data = rng.choice(BYTE_MUTATIONS)(data, rng)
    return data


def structure_mutation(name: str) -> Mutation | None:
    """Return the mutation for the format of a file name; None if only its bytes can be mutated."""
    stem = name.removesuffix(".gz")
    for suffix, mutation in STRUCTURES.items():
        if stem.endswith(suffix):
            return mutation if stem == name else partial(mutate_packed, mutation)
    return None


def mutate_packed(mutation: Mutation, data: bytes, rng: random.Random) -> bytes:
    return gzip.compress(mutation(unpack(data), rng))


def unpack(data: bytes) -> bytes:
    """Return unpacked data; a damaged file is returned unchanged."""
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error):
        return data


def mutate_yaml(data: bytes, rng: random.Random) -> bytes:
    """Change one value or key of a YAML file; a file that is not YAML any more gets changed bytes."""
    if b"*" in data or len(data) > 1 << 20:  # aliases may stand for a tree without end
        return rng.choice(BYTE_MUTATIONS)(data, rng)
    try:
        tree = yaml.safe_load(data)
        changed = change_tree(tree, rng, len(RAW_YAML))
        text = yaml.safe_dump(changed, sort_keys=False, allow_unicode=True, width=1 << 20)
    except (yaml.YAMLError, ValueError, RecursionError):
        return rng.choice(BYTE_MUTATIONS)(data, rng)
    return insert_raw(text, RAW_YAML)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Change one value or key of a JSON file."""
    try:
        return insert_raw(json.dumps(change_tree(json.loads(data), rng, len(RAW_JSON))), RAW_JSON)
    except (ValueError, RecursionError):
        return rng.choice(BYTE_MUTATIONS)(data, rng)


def mutate_json_lines(data: bytes, rng: random.Random) -> bytes:
    """Change one line of a file of JSON lines."""
    lines = data.splitlines(keepends=True)
    if not lines or rng.random() < 0.2:
        return rng.choice(BYTE_MUTATIONS)(data, rng)
    k = rng.randrange(len(lines))
    lines[k] = mutate_json(lines[k], rng).rstrip(b"\n") + b"\n"
    return b"".join(lines)


def change_tree(tree: Any, rng: random.Random, raw_count: int) -> Any:
    """Return a tree with one value replaced, or one key dropped, renamed, added or repeated."""
    paths = list(paths_of(tree))
    path = rng.choice(paths)
    value: Any = MARK.format(rng.randrange(raw_count)) if rng.random() < 0.3 else rng.choice(VALUES)
    if not path:
        return value if rng.random() < 0.3 else tree
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    key, action = path[-1], rng.choice(("replace", "replace", "replace", "drop", "key", "scale", "other"))
    if action == "drop":
        del parent[key]
    elif action == "key" and isinstance(parent, dict):
        parent[rng.choice(("", "x", f"{key}s", "a\nb", "../../x", value if isinstance(value, str) else "y"))] = parent[
            key
        ]
    elif action == "key":
        parent.append(parent[key])
    elif action == "scale" and isinstance(parent[key], (int, float)) and not isinstance(parent[key], bool):
        parent[key] = parent[key] * rng.choice((-1, 0, 0.5, 20, 10**13))
    elif action == "other":
        other = tree
        for step in rng.choice(paths):
            other = other[step]
        parent[key] = copy.deepcopy(other)  # a copy: no cycle
    else:
        parent[key] = value
    return tree


def paths_of(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every value of a tree."""
    yield path
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from paths_of(value, (*path, key))
    elif isinstance(tree, list):
        for k, value in enumerate(tree):
            yield from paths_of(value, (*path, k))


def insert_raw(text: str, raw: tuple[str, ...]) -> bytes:
    """Replace the marks by the raw texts, without the quotes around them."""
    pattern = re.compile("['\"]?" + MARK.format(r"(\d+)") + "['\"]?")
    return pattern.sub(lambda match: raw[int(match[1])], text).encode("utf-8", "surrogatepass")


def mutate_csv(data: bytes, rng: random.Random) -> bytes:
    """Change one cell, row or column of a CSV file."""
    try:
        rows = list(csv.reader(io.StringIO(data.decode("utf-8"), newline="")))
    except (ValueError, csv.Error):
        return rng.choice(BYTE_MUTATIONS)(data, rng)
    rows = [row for row in rows if row]
    if not rows:
        return b"\n"
    k = rng.randrange(len(rows))
    j = rng.randrange(len(rows[k]))
    action = rng.choice(("cell", "cell", "cell", "drop", "repeat", "short", "long", "column", "header", "separator"))
    if action == "cell":
        rows[k][j] = rng.choice(CELLS)
    elif action == "drop":
        del rows[k]
    elif action == "repeat":
        rows.insert(k, list(rows[k]))
    elif action == "short":
        del rows[k][j:]
    elif action == "long":
        rows[k].extend(rng.choices(CELLS, k=rng.randrange(1, 4)))
    elif action == "column":
        rows = [row[:j] + row[j + 1 :] for row in rows]
    elif action == "header":
        rows[0][min(j, len(rows[0]) - 1)] = rng.choice(("", "x", rows[0][0], "a\nb"))
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\n", delimiter=";" if action == "separator" else ",").writerows(rows)
    return out.getvalue().encode("utf-8", "surrogatepass")


def mutate_log(data: bytes, rng: random.Random) -> bytes:
    """Change one number or word of a text log."""
    words = list(re.finditer(rb"[\w.]+", data))
    if not words:
        return b""
    word = rng.choice(words)
    cell = rng.choice(CELLS).encode("utf-8", "surrogatepass")
    return data[: word.start()] + cell + data[word.end() :]


def mutate_npz(data: bytes, rng: random.Random) -> bytes:
    """Change one array of a NumPy archive."""
    import numpy as np

    try:
        with np.load(io.BytesIO(data)) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception:  # a damaged archive raises almost anything
        return rng.choice(BYTE_MUTATIONS)(data, rng)
    name = rng.choice(sorted(arrays))
    array = arrays.pop(name)
    if array.dtype.kind not in "fiu" or not array.size:  # changed before
        return rng.choice(BYTE_MUTATIONS)(data, rng)
    flat = np.atleast_1d(array).ravel()
    changes = (
        np.array([]), np.array("x"), np.array([["a"]]), np.array(np.nan), np.array([np.inf]), np.array([[np.nan]]),
        array[None], flat, -array, array + 1e308, np.array([{}], dtype=object), flat[:0], array.astype(complex),
        np.array(-1), np.array(10**9), array.astype(bool), flat[:1].reshape(array.ndim * (1,)), np.array(0),
    )  # fmt: skip
    if rng.random() < 0.85:
        arrays[name] = rng.choice(changes)
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def flip(data: bytes, rng: random.Random) -> bytes:
    """Change some bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 4, 16)) if data else 0):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def cut(data: bytes, rng: random.Random) -> bytes:
    """Delete a range."""
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.choice((1, 1, 8, 64)) :]


def insert(data: bytes, rng: random.Random) -> bytes:
    """Insert a short text."""
    texts = (
        b"\0", b"\xff\xfe", b"\r", b"\n", b"\t", b"'", b'"', b"{", b"]", b"- ", b": ", b"#", b"&a ", b"*a", b"%",
        b"\x1b[2J",
        b"\xed\xa0\x80", "\u2028".encode(), b"9" * 400, b"<<: *x\n", b",,,,", b"---\n", b"!!set ",
    )  # fmt: skip
    start = rng.randrange(len(data) + 1)
    return data[:start] + rng.choice(texts) + data[start:]


def repeat(data: bytes, rng: random.Random) -> bytes:
    """Repeat a range, or the whole file."""
    start, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    return data + data if rng.random() < 0.3 else data[:end] + data[start:end] * rng.choice((1, 2, 20)) + data[end:]


def whole_file(data: bytes, rng: random.Random) -> bytes:
    """Encode, pack or replace the whole file."""
    forms = (
        b"", b"\n", b"\0" * 10, b"\xef\xbb\xbf" + data, data.replace(b"\n", b"\r\n"), data.replace(b"\n", b"\r"),
        data.decode("utf-8", "replace").encode("utf-16"), gzip.compress(data), gzip.compress(data)[:-5],
        b"\x1f\x8b" + data, gzip.compress(gzip.compress(data)), data.rstrip(b"\n"), b"[" * DEPTH, b"null", b"[]", b"{}",
        b"- " * 500, b"\x1f\x8b\x08\x00", b"PK\x03\x04" + data, b"PAR1" + data + b"PAR1", data[:1],
    )  # fmt: skip
    return rng.choice(forms)


def truncate(data: bytes, rng: random.Random) -> bytes:
    """Keep only the start, as after a kill or on a full disk."""
    return data[: rng.randrange(len(data) + 1)]


def shuffle_lines(data: bytes, rng: random.Random) -> bytes:
    """Change the order of the lines."""
    lines = data.splitlines(keepends=True)
    rng.shuffle(lines)
    return b"".join(lines)


BYTE_MUTATIONS = (flip, cut, insert, repeat, truncate, whole_file, shuffle_lines)
STRUCTURES: dict[str, Mutation] = {
    ".yaml": mutate_yaml,
    ".json": mutate_json,
    ".jsonl": mutate_json_lines,
    ".journal": mutate_json_lines,
    ".csv": mutate_csv,
    ".txt": mutate_log,
    ".npz": mutate_npz,
}

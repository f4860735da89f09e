"""ServeGen: requests sampled from descriptions of clients.

A client is two files: chunk-N-trace.csv, a row for each ten minutes (start, rate, CV, Gamma or Weibull, shape, scale;
no name means no traffic), and chunk-N-dataset.json, for each six hours the probability of every length. A folder of
them is a whole service. Prompts and outputs are drawn independently.
"""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.core import BadInput
from servesim.files.read import PathLike, parse_json, read_text, shown
from servesim.traces.random_streams import stream
from servesim.traces.trace import Columns

from .table import MOST_TOKENS, csv_table

CHUNK = re.compile(r"(.*chunk-\d+-)(trace\.csv|dataset\.json)(\.gz)?")
HEADER = ("start", "rate", "cv", "pattern", "shape", "scale")
GAPS = ("Gamma", "Weibull")
FIRST = re.compile(r"\d+,[-+.\deE]+,[-+.\deE]+,(Gamma|Weibull)?,[-+.\deE]+,[-+.\deE]+\s*$", re.MULTILINE)
USUAL = 600.0  # seconds of a window, for the last one of a file
MOST = 5_000_000  # requests to sample at most

Floats = NDArray[np.float64]


class Window(NamedTuple):
    """A stretch of steady traffic."""

    start: float
    end: float
    rate: float  # requests a second
    pattern: str  # distribution of the gaps
    shape: float


class Client(NamedTuple):
    """Who sends: when, and how long."""

    name: str
    windows: list[Window]
    lengths: list[tuple[float, Any, Any]]  # start, prompts and outputs as (tokens, cumulated probability)


def is_servegen(path: PathLike) -> bool:
    """Return whether a path is a client's file, or a folder of them."""
    path = Path(path)
    if path.is_dir():
        return any(CHUNK.fullmatch(file.name) for file in path.iterdir())
    return CHUNK.fullmatch(path.name) is not None


def servegen(path: PathLike, seed: int, start: float = 0.0, end: float = math.inf) -> Columns:
    """Return requests of a client, or of all clients in a folder, within a stretch of time."""
    clients = [_client(stem, suffix) for stem, suffix in _stems(Path(path))]
    expected = sum(
        max(0.0, min(end, window.end) - max(start, window.start)) * window.rate
        for client in clients
        for window in client.windows
    )
    if expected > MOST:
        raise BadInput(f"{path}: about {expected:.3g} requests, expected at most {MOST}: choose a stretch of time")
    columns = Columns([], [], arrival=[])
    assert columns.arrival is not None
    for client in clients:
        _sample(client, seed, start, end, columns)
    columns.numbers = range(1, len(columns.prompt) + 1)
    columns.notes.append(f"sampled from the descriptions of {len(clients)} clients, seed {seed}")
    return columns


def _stems(path: Path) -> list[tuple[Path, str]]:
    """Return the common part of the names of each client's two files, and their ending."""
    if path.is_dir():
        names = {(m.group(1), m.group(3) or "") for m in map(CHUNK.fullmatch, (f.name for f in path.iterdir())) if m}
        return [(path / stem, suffix) for stem, suffix in sorted(names, key=_number)]
    match = CHUNK.fullmatch(path.name)
    if match is None:
        raise BadInput(f"{path}: expected the name chunk-N-trace.csv with chunk-N-dataset.json beside it")
    return [(path.parent / match.group(1), match.group(3) or "")]


def _number(name: tuple[str, str]) -> tuple[int, str]:
    digits = re.findall(r"\d+", name[0])
    return int(digits[-1]), name[0]


def _client(stem: Path, suffix: str) -> Client:
    trace, dataset = Path(f"{stem}trace.csv{suffix}"), Path(f"{stem}dataset.json{suffix}")
    return Client(stem.name.rstrip("-"), _windows(trace), _lengths(dataset))


def _windows(path: Path) -> list[Window]:
    table = csv_table(str(path), read_text(path), HEADER)
    starts, rates, shapes = table.seconds("start"), table.seconds("rate"), table.seconds("shape")
    patterns = table.columns["pattern"]
    windows = []
    for i, start in enumerate(starts):
        end = starts[i + 1] if i + 1 < len(starts) else start + (start - starts[i - 1] if i else USUAL)
        if end <= start:
            raise table.bad(i + 1, "start", f"more than {start:g}")
        if patterns[i] == "" or rates[i] == 0:
            continue
        if patterns[i] not in GAPS:
            raise table.bad(i, "pattern", f"one of {', '.join(GAPS)}")
        if not 1e-3 <= shapes[i] <= 1e6:
            raise table.bad(i, "shape", "a number from 0.001 to 1e6")
        windows.append(Window(start, end, rates[i], patterns[i], shapes[i]))
    return windows


def _lengths(path: Path) -> list[tuple[float, Any, Any]]:
    """Return the distributions of lengths, in order of time; windows without any are left out."""
    data = parse_json(path, read_text(path))
    if type(data) is not dict:
        raise BadInput(f"{path}: row 1: expected an object of times, got {shown(data)}")
    found = []
    for time, fields in data.items():
        if not time.isdecimal() or type(fields) is not dict:
            raise BadInput(f"{path}: row 1: {shown(time)}: expected seconds with input_tokens and output_tokens")
        prompts = _distribution(path, time, "input_tokens", fields)
        outputs = _distribution(path, time, "output_tokens", fields)
        if prompts is not None and outputs is not None:
            found.append((float(time[:15]), prompts, outputs))
    return sorted(found, key=lambda entry: entry[0])


def _distribution(path: Path, time: str, key: str, fields: dict[str, Any]) -> Optional[tuple[Floats, Floats]]:
    """Return lengths and cumulated probabilities of "{100: 0.5, 200: 0.5}"."""
    bad = BadInput(f"{path}: row 1: {time}.{key}: expected {{tokens: probability, ...}}, got {shown(fields.get(key))}")
    try:
        parts = ast.literal_eval(fields[key])
    except (KeyError, ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise bad from None
    if type(parts) is not dict:
        raise bad
    if not parts:
        return None
    for tokens, chance in parts.items():
        if type(tokens) is not int or not 0 <= tokens <= MOST_TOKENS:
            raise bad
        if type(chance) not in (int, float) or not 0 <= chance < math.inf:
            raise bad
    total = np.cumsum(np.array(list(parts.values()), np.float64))
    if not total[-1] > 0:
        raise bad
    return np.array(list(parts), np.float64), total / total[-1]


def _sample(client: Client, seed: int, start: float, end: float, columns: Columns) -> None:
    """Add the requests of one client."""
    assert columns.arrival is not None
    gaps = stream(seed, f"arrivals {client.name}")
    chances = {name: stream(seed, f"{name} {client.name}") for name in ("prompts", "outputs")}
    for window in client.windows:
        times = _times(window, gaps)
        known = [entry for entry in client.lengths if entry[0] <= window.start]
        times = times[(times >= start) & (times < end)]
        first = len(columns.prompt)
        columns.arrival.extend((times - (start if start > 0 else 0.0)).tolist())
        if not known:
            columns.unusable.update((k, "no lengths known") for k in range(first, first + len(times)))
            columns.prompt.extend([1] * len(times))
            columns.output.extend([1] * len(times))
            continue
        columns.prompt.extend(_draw(known[-1][1], chances["prompts"], len(times)))
        columns.output.extend(_draw(known[-1][2], chances["outputs"], len(times)))


def _times(window: Window, chance: np.random.Generator) -> Floats:
    """Return arrivals that fill a window: as many as its rate says, gaps of its shape.

    The fitted scale is left aside: with gaps as uneven as these, it and the rate disagree by up to a factor of two.
    """
    span = window.end - window.start
    count = int(window.rate * span + chance.random())
    if not count:
        return np.empty(0)
    if window.pattern == "Gamma":
        gaps = chance.gamma(window.shape, 1.0, count + 1)
    else:
        gaps = chance.weibull(window.shape, count + 1)
    total = float(gaps.sum())
    if not 0 < total < math.inf:
        gaps, total = np.ones(count + 1), count + 1.0
    return np.asarray(window.start + span * np.cumsum(gaps)[:-1] / total, np.float64)


def _draw(distribution: tuple[Floats, Floats], chance: np.random.Generator, count: int) -> list[int]:
    tokens, cumulated = distribution
    places = np.minimum(np.searchsorted(cumulated, chance.random(count), side="right"), len(tokens) - 1)
    return [int(value) for value in tokens[places]]

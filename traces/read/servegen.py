"""ServeGen: requests sampled from descriptions of clients.

A client has two files. chunk-N-trace.csv has one row per ten minutes: start, rate, CV, Gamma or Weibull, shape, scale.
An empty distribution means no traffic. chunk-N-dataset.json has the probability of every length, per six hours.
A folder of such files is one service. Prompt and output lengths are sampled independently.
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
from servesim.core.limits import MAX_INT
from servesim.files.read import PathLike, parse_json, quote, read_text
from servesim.traces.trace import Columns, stream

from .source import csv_table

FILE_NAME = re.compile(r"(.*chunk-\d+-)(trace\.csv|dataset\.json)(\.gz)?")
HEADER = ("start", "rate", "cv", "pattern", "shape", "scale")
GAP_DISTRIBUTIONS = ("Gamma", "Weibull")
FIRST_ROW = re.compile(r"\d+,[-+.\deE]+,[-+.\deE]+,(Gamma|Weibull)?,[-+.\deE]+,[-+.\deE]+\s*$", re.MULTILINE)
DEFAULT_WINDOW_S = 600.0  # length of a window, if a file has only one
MAX_REQUESTS = 5_000_000  # per trace

Floats = NDArray[np.float64]


class Window(NamedTuple):
    """A time window with a constant rate."""

    start: float
    end: float
    rate: float  # requests per second
    pattern: str  # distribution of the gaps
    shape: float


class Client(NamedTuple):
    """One client: its arrival windows and its length distributions."""

    name: str
    windows: list[Window]
    lengths: list[tuple[float, Any, Any]]  # start; prompts and outputs as (tokens, cumulative probability)


def is_servegen(path: PathLike) -> bool:
    """Return whether a path is a file of a client, or a folder of such files."""
    path = Path(path)
    if path.is_dir():
        return any(FILE_NAME.fullmatch(file.name) for file in path.iterdir())
    return FILE_NAME.fullmatch(path.name) is not None


def servegen(path: PathLike, seed: int, start: float = 0.0, end: float = math.inf) -> Columns:
    """Return the requests of a client, or of all clients in a folder, between two times in seconds."""
    clients = [_client(stem, suffix) for stem, suffix in _stems(Path(path))]
    expected = sum(
        max(0.0, min(end, window.end) - max(start, window.start)) * window.rate
        for client in clients
        for window in client.windows
    )
    if expected > MAX_REQUESTS:
        raise BadInput(f"{path}: about {expected:.3g} requests, expected at most {MAX_REQUESTS}: use a shorter window")
    columns = Columns([], [], arrival=[])
    assert columns.arrival is not None
    for client in clients:
        _sample(client, seed, start, end, columns)
    columns.numbers = range(1, len(columns.prompt) + 1)
    columns.notes.append(f"sampled from the descriptions of {len(clients)} clients, seed {seed}")
    return columns


def _stems(path: Path) -> list[tuple[Path, str]]:
    """Return the common prefix and the suffix of each client's two file names."""
    if path.is_dir():
        names = {
            (m.group(1), m.group(3) or "") for m in map(FILE_NAME.fullmatch, (f.name for f in path.iterdir())) if m
        }
        return [(path / stem, suffix) for stem, suffix in sorted(names, key=_number)]
    match = FILE_NAME.fullmatch(path.name)
    if match is None:
        raise BadInput(f"{path}: expected chunk-N-trace.csv, with chunk-N-dataset.json in the same folder")
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
        end = starts[i + 1] if i + 1 < len(starts) else start + (start - starts[i - 1] if i else DEFAULT_WINDOW_S)
        if end <= start:
            raise table.error(i + 1, "start", f"more than {start:g}")
        if patterns[i] == "" or rates[i] == 0:
            continue
        if patterns[i] not in GAP_DISTRIBUTIONS:
            raise table.error(i, "pattern", f"one of {', '.join(GAP_DISTRIBUTIONS)}")
        if not 1e-3 <= shapes[i] <= 1e6:
            raise table.error(i, "shape", "a number from 0.001 to 1e6")
        windows.append(Window(start, end, rates[i], patterns[i], shapes[i]))
    return windows


def _lengths(path: Path) -> list[tuple[float, Any, Any]]:
    """Return the length distributions in order of time, without empty ones."""
    data = parse_json(path, read_text(path))
    if type(data) is not dict:
        raise BadInput(f"{path}: row 1: expected an object of times, got {quote(data)}")
    distributions = []
    for time, fields in data.items():
        if not time.isdecimal() or type(fields) is not dict:
            raise BadInput(f"{path}: row 1: {quote(time)}: expected seconds with input_tokens and output_tokens")
        prompts = _distribution(path, time, "input_tokens", fields)
        outputs = _distribution(path, time, "output_tokens", fields)
        if prompts is not None and outputs is not None:
            distributions.append((float(time[:15]), prompts, outputs))
    return sorted(distributions, key=lambda entry: entry[0])


def _distribution(path: Path, time: str, key: str, fields: dict[str, Any]) -> Optional[tuple[Floats, Floats]]:
    """Return lengths and cumulative probabilities of "{100: 0.5, 200: 0.5}"."""
    bad = BadInput(f"{path}: row 1: {time}.{key}: expected {{tokens: probability, ...}}, got {quote(fields.get(key))}")
    try:
        probabilities = ast.literal_eval(fields[key])
    except (KeyError, ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise bad from None
    if type(probabilities) is not dict:
        raise bad
    if not probabilities:
        return None
    for tokens, probability in probabilities.items():
        if type(tokens) is not int or not 0 <= tokens <= MAX_INT:
            raise bad
        if type(probability) not in (int, float) or not 0 <= probability < math.inf:
            raise bad
    total = np.cumsum(np.array(list(probabilities.values()), np.float64))
    if not total[-1] > 0:
        raise bad
    return np.array(list(probabilities), np.float64), total / total[-1]


def _sample(client: Client, seed: int, start: float, end: float, columns: Columns) -> None:
    """Add the requests of one client."""
    assert columns.arrival is not None
    gaps = stream(seed, f"arrivals {client.name}")
    length_streams = {name: stream(seed, f"{name} {client.name}") for name in ("prompts", "outputs")}
    for window in client.windows:
        times = _arrivals(window, gaps)
        started = [entry for entry in client.lengths if entry[0] <= window.start]
        times = times[(times >= start) & (times < end)]
        first = len(columns.prompt)
        columns.arrival.extend((times - (start if start > 0 else 0.0)).tolist())
        if not started:
            columns.unusable.update((k, "no lengths known") for k in range(first, first + len(times)))
            columns.prompt.extend([1] * len(times))
            columns.output.extend([1] * len(times))
            continue
        columns.prompt.extend(_draw(started[-1][1], length_streams["prompts"], len(times)))
        columns.output.extend(_draw(started[-1][2], length_streams["outputs"], len(times)))


def _arrivals(window: Window, rng: np.random.Generator) -> Floats:
    """Return the arrivals of a window; the rate gives their number, the shape their gaps.

    The fitted scale is not used: with gaps this irregular, it disagrees with the rate by up to a factor of two.
    """
    span = window.end - window.start
    count = int(window.rate * span + rng.random())
    if not count:
        return np.empty(0)
    if window.pattern == "Gamma":
        gaps = rng.gamma(window.shape, 1.0, count + 1)
    else:
        gaps = rng.weibull(window.shape, count + 1)
    total = float(gaps.sum())
    if not 0 < total < math.inf:
        gaps, total = np.ones(count + 1), count + 1.0
    return np.asarray(window.start + span * np.cumsum(gaps)[:-1] / total, np.float64)


def _draw(distribution: tuple[Floats, Floats], rng: np.random.Generator, count: int) -> list[int]:
    tokens, cumulative = distribution
    indices = np.minimum(np.searchsorted(cumulative, rng.random(count), side="right"), len(tokens) - 1)
    return [int(value) for value in tokens[indices]]

"""Compare texts and metrics of two runs, without the product: tools/compare_builds.py compares two builds of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Optional

NUMBER = re.compile(r"(?<![\w.#])-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.#])")
TOLERANCE = 1e-9  # relative, of times and sums


def metrics_of(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of a result.json with its value, also those of lists of mappings."""
    if isinstance(tree, list) and tree and isinstance(tree[0], dict):
        tree = dict(enumerate(tree))
    if not isinstance(tree, dict) or not tree:
        yield path, tree
        return
    for key, value in tree.items():
        yield from metrics_of(value, f"{path}.{key}" if path else str(key))


def is_same(value: Any, other: Any, key: str = "") -> bool:
    """Whether two metrics are equal; floats are sums in another order."""
    if isinstance(value, float) and isinstance(other, float):
        return distance(value, other, key) <= TOLERANCE or (math.isnan(value) and math.isnan(other))
    return bool(value == other)


def distance(value: float, other: float, key: str = "") -> float:
    """Return the relative difference of two numbers; 0 if both are almost 0. A deviation of equal gaps cancels."""
    if value == other or math.isclose(value, other, rel_tol=0.0, abs_tol=1e-8 if "std_" in key else 1e-12):
        return 0.0
    return abs(value - other) / max(abs(value), abs(other))


def first_difference(one: str, other: str, exact: bool = False) -> Optional[tuple[int, str, str]]:
    """Return the number of the first line that differs, and this line of both texts; None: rounding errors at most."""
    lines, others = one.splitlines(), other.splitlines()
    for number, pair in enumerate(zip([*lines, "(end)"], [*others, "(end)"]), 1):
        if pair[0] != pair[1] and (exact or not is_rounding(*pair)):
            return number, *pair
    return None


def is_rounding(line: str, other: str) -> bool:
    """Whether two lines differ only in the last digits of numbers that are not whole."""
    if NUMBER.split(line) != NUMBER.split(other):
        return False
    pairs = zip(NUMBER.findall(line), NUMBER.findall(other))
    return all(one == two or (re.search("[.e]", one + two) and is_same(float(one), float(two))) for one, two in pairs)

"""Limits of numbers in files, options and policies. A larger number is a typing error or a wrong unit.

The limits also keep computations finite: a sum or product of accepted numbers is far below the largest float.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, Final, Optional

from .errors import BadInput

MAX_INT: Final = 2**31 - 1  # blocks, rows, ids and other whole numbers
MAX_SEED: Final = 2**63 - 1
MAX_TOKENS: Final = 10_000_000  # prompt or output of one request
MAX_BLOCK_SIZE: Final = 1_000_000  # tokens per KV block
MAX_DRAFTS: Final = 1000  # drafted tokens of a request per step
MAX_RANKS = 1024  # data-parallel ranks
MAX_REQUESTS: Final = 10_000_000  # of one workload
MAX_CONFIGS: Final = 100_000  # configurations of a sweep, trials of a search
MAX_RUNS: Final = 1_000_000  # configurations * replications
MAX_JOBS: Final = 1024  # worker processes
DEFAULT_DRAWS: Final = 24  # random cost models of an interval, as many as a fit stores
MAX_DRAWS: Final = 1000
MIN_NUMBER: Final = 1e-12  # numbers without a unit, and fields of policies
MAX_NUMBER: Final = 1e12
MAX_SECONDS: Final = 1e9  # durations: 31 years
MAX_COST: Final = 1e6  # seconds of one term of a step: 11 days
MAX_STEP: Final = 1e30  # seconds of one step: the sum of all steps stays finite
MAX_RESULT: Final = 1e30  # numbers that servesim computed: sums and squares of them are finite
MIN_RATE: Final = 1e-9  # requests per second
MAX_RATE: Final = 1e9
MIN_CV: Final = 1e-3  # coefficient of variation of gaps
MAX_CV: Final = 1e3
MIN_BURSTINESS: Final = 1e-6  # 1 / cv ** 2
MAX_BURSTINESS: Final = 1e6
MAX_SIGMA: Final = 20.0  # standard deviation of a logarithm


def is_number(value: Any, minimum: float = -MAX_NUMBER, maximum: float = MAX_NUMBER) -> bool:
    """Return whether a value is a number in a range, also of NumPy; NaN, infinity, true and huge integers are not."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and bool(minimum <= value <= maximum)


def check_replications(count: Any, name: str) -> None:
    """Raise BadInput for a wrong number of replications; `name` is the option or the argument."""
    if not isinstance(count, Integral) or not is_number(count, 1, MAX_RUNS):
        raise BadInput(f"{name}: expected at least 1, at most {MAX_RUNS}, got {show_number(count)}")


def check_fraction(value: Any, name: str) -> None:
    """Raise BadInput for a number that is not above 0 and below 1; `name` is the option or the argument."""
    if not is_number(value, 0, 1) or value in (0, 1):
        raise BadInput(f"{name}: expected a fraction between 0 and 1, got {show_number(value)}")


def draw_count(value: Any) -> Optional[int]:
    """Return a number of draws of the cost model; true is the default one, false is 0. None: the value is wrong."""
    count = DEFAULT_DRAWS if value is True else 0 if value is False else value
    return int(count) if is_number(count, 0, MAX_DRAWS) and count % 1 == 0 and count != 1 else None


def show_number(value: Any) -> str:
    """Return a value as a message shows it."""
    return f"{value:g}" if isinstance(value, float) else repr(value)

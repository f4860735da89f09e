"""Limits of numbers in files, options and policies. A larger number is a typing error or a wrong unit.

The limits also keep computations finite: a sum or product of accepted numbers is far below the largest float.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

MAX_INT = 2**31 - 1  # blocks, rows, ids and other whole numbers
MAX_SEED = 2**63 - 1
MAX_TOKENS = 10_000_000  # prompt or output of one request
MAX_BLOCK_SIZE = 1_000_000  # tokens per KV block
MAX_REQUESTS = 10_000_000  # of one workload
MAX_CONFIGS = 100_000  # configurations of a sweep, trials of a search
MAX_RUNS = 1_000_000  # configurations * replications
MAX_JOBS = 1024  # worker processes
MIN_NUMBER, MAX_NUMBER = 1e-12, 1e12  # numbers without a unit, and fields of policies
MAX_SECONDS = 1e9  # durations: 31 years
MAX_COST = 1e6  # seconds of one term of a step: 11 days
MAX_STEP = 1e30  # seconds of one step: the sum of all steps stays finite
MAX_RESULT = 1e30  # numbers that servesim computed: sums and squares of them are finite
MIN_RATE, MAX_RATE = 1e-9, 1e9  # requests per second
MIN_CV, MAX_CV = 1e-3, 1e3  # coefficient of variation of gaps
MIN_BURSTINESS, MAX_BURSTINESS = 1e-6, 1e6  # 1 / cv ** 2
MAX_SIGMA = 20.0  # standard deviation of a logarithm


def is_number(value: Any, minimum: float = -MAX_NUMBER, maximum: float = MAX_NUMBER) -> bool:
    """Return whether a value is a number in a range, also of NumPy; NaN, infinity, true and huge integers are not."""
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    return is_real and bool(minimum <= value <= maximum)

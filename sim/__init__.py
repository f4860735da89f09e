"""servesim: a simulator of LLM-serving schedulers, calibrated and validated on real hardware.

The Python API is `run`, `sweep`, `search`, `compare`, `check`, `capacity`, `replay`, `load` and `explore` (see api.py).
It is loaded on first use: importing the package itself needs the standard library only.
"""

from typing import TYPE_CHECKING, Any

if __name__ != "servesim":
    raise ImportError(f"import servesim, not {__name__}: run `pip install -e .` first")

from .version import __version__

if TYPE_CHECKING:
    from .api import capacity, check, compare, explore, load, replay, run, search, sweep

__all__ = ["__version__", "capacity", "check", "compare", "explore", "load", "replay", "run", "search", "sweep"]


def __getattr__(name: str) -> Any:
    """Load the API on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'servesim' has no attribute {name!r}")
    from . import api

    return getattr(api, name)

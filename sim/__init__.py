"""servesim: a simulator of LLM-serving schedulers, calibrated on real hardware and proven on it.

From Python: `servesim.run`, `servesim.sweep`, `servesim.replay` and `servesim.load`, described in api.py. They are
loaded when first asked for: importing the package itself takes nothing but the standard library.
"""

from typing import TYPE_CHECKING, Any

if __name__ != "servesim":
    raise ImportError(f"import servesim, not {__name__}: run `pip install -e .` first")

if TYPE_CHECKING:
    from .api import load, replay, run, sweep

__version__ = "0.1.0"
__all__ = ["__version__", "load", "replay", "run", "sweep"]


def __getattr__(name: str) -> Any:
    """Load the API when something of it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'servesim' has no attribute {name!r}")
    from . import api

    return getattr(api, name)

"""servesim: a simulator of LLM-serving schedulers, calibrated on real hardware and proven on it."""

if __name__ != "servesim":
    raise ImportError(f"import servesim, not {__name__}: run `pip install -e .` first")

__version__ = "0.1.0"

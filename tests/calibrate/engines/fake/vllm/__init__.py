"""A small vLLM for the tests of the worker: the names that servesim uses, FCFS, chunked prefill."""

__version__ = "0.32.0"

"""Run a scenario on a backend: the live driver, its clocks, block tables and prompts.

`driver` and its imports run in the worker (Python 3.9, numpy). It imports device, probe, engine and runs; replay and
server import it.
"""

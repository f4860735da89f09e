"""Run a scenario on a backend: the driver, block tables, prompts, and the answers of a token check.

`driver`, `replay_job` and their imports run in the worker (Python 3.9, numpy). It imports device, probe, config,
engine and runs; replay, server, tune, api and commands import it.
"""

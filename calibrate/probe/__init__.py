"""Measure step times on a device, fit a cost model to them, and check it.

`grid`, `measure` and `power` run in the worker (Python 3.9, numpy). It imports device, costs and runs; live, replay and
commands import it.
"""

"""Fit step costs to logs of real runs: the simulator runs inside the fit.

It imports runs and the layers below, and nothing else of calibrate. Only commands imports it.
"""

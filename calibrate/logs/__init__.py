"""Fit step costs to logs of real runs: the simulator runs inside the fit."""

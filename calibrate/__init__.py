"""Calibration and replay: step costs from devices, logs and servers, and live runs to compare with a simulation.

One sub-package per job (docs/structure.md). It imports core, files, engine, costs, config, runs, study and traces;
only commands, api and frames import it.
"""

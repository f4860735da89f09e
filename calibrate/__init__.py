"""Calibration and replay: step costs from devices, logs and servers, and live runs to compare with a simulation."""

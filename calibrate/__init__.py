"""Calibration: step latencies from devices, logs and endpoints, and the live replay."""

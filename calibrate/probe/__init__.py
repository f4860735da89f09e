"""Measure step times on a device, fit a cost model to them, and check it."""

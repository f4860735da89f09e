"""Backends that run model calls on a device, and the worker process that holds one (Python 3.9, numpy)."""

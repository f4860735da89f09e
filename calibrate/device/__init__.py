"""Backends that run model calls on a device, and the worker process that holds one.

Needs Python 3.9, numpy and the framework; it also runs from a copy of the folders, not installed. It imports core
and costs; probe, live, replay, server and endpoint import it.
"""

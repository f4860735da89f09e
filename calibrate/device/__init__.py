"""Backends that run model calls on a device, and the worker process that holds one.

Standard library, numpy and the framework, Python 3.9: the folder also runs from a plain copy. It imports core and
costs; probe, live, replay, server and endpoint import it.
"""

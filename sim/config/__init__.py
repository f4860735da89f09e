"""Configuration: scenarios, workloads, policies by name, presets, and overrides, all checked with pydantic.

It imports core, files, costs, policies and traces. runs and everything above import it.
"""

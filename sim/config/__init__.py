"""Configuration: scenarios, policies by name, presets and overrides, checked with pydantic.

It imports core, files, costs, policies and traces. runs and everything above import it.
"""

"""Configuration: scenarios, policies by name, presets and overrides, checked with pydantic.

It imports core, files, costs, policies and traces, and loads the configurations of engines in policies/ by name. runs
and everything above import it.
"""

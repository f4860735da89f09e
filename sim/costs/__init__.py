"""Cost models, which predict the seconds of a step, and the profile folder that stores them.

It imports core and files. All packages above import it, except the engine, which uses the interface in core.
"""

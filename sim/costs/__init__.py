"""Cost models: what a step takes, from terms, tables or measurements, and the profile folder that keeps them.

It imports core and files. Everything above imports it; the engine knows only the interface in core.
"""

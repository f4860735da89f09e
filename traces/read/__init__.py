"""Read traces: every known format, recognised from its content.

It imports core, files and the modules of traces. traces/make, config and runs import it.
"""

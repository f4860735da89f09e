"""Read traces: every known format, detected from the content.

It imports core, files and the modules of traces. traces/make, config and runs import it.
"""

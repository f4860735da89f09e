"""Workloads: a trace in memory, its edits, exports and statistics; `read` loads traces, `make` generates them.

It imports core and files. config and everything above may import it.
"""

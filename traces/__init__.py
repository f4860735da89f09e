"""Workloads: a trace in memory, its edits, exports and description; `read` loads traces, `make` draws them.

It imports core and files. config and everything above may import it.
"""

"""Make workloads: arrivals and lengths drawn from named random streams, and the contest's own.

It imports core, files, traces and traces/read. config and runs import it.
"""

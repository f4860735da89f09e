"""Synthetic workloads: arrivals and lengths from named random streams, and the workload of the contest.

It imports core, files, traces and traces/read. config and runs import it.
"""

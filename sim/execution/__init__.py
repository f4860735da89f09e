"""Execution of runs: one run as a task, executors in this process, in a process pool or on a cluster, progress.

It imports statistics and the packages below it. study and the packages above it import it.
"""

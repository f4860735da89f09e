"""Many runs: sweeps, searches, capacity, comparisons, their statistics and their folders.

It imports runs and what lies below. report, frames, api and commands import it.
"""

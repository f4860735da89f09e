"""Many runs: sweeps, searches, capacity, comparisons, their statistics and their folders.

It imports runs and the packages below runs. report, frames, api and commands import it.
"""

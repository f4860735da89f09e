"""Many runs: sweeps and comparisons, their ranking and their folders.

It imports execution and the packages below it. searches, report, frames, api and commands import it.
"""

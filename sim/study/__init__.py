"""Many runs: sweeps and comparisons, their ranking and their folders.

It imports statistics and the packages below it. report, calibrate, frames, api and commands import it.
"""

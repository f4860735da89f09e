"""Many runs: sweeps over settings and request rates, searches and comparisons; their rankings, tables and folders.

It imports statistics and the packages below it. report, calibrate, frames, api and commands import it.
"""

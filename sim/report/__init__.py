"""Report pages and charts: sweeps, searches, request rates, comparisons, and simulated against measured runs.

It imports study and the packages below it. frames and commands import it.
"""

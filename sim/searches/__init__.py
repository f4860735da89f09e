"""Searches: Optuna over configurations, and bisection for the highest request rate.

It imports study and the packages below study. report, api and commands import it.
"""

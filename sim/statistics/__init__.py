"""Values of metrics: objectives, constraints, confidence intervals, and numbers as text.

It imports runs and the packages below runs. study and the packages above it import it.
"""

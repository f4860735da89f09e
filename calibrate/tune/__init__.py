"""`sim tune`: sweep, measure the leading configurations live, correct the profile, and sweep again.

It imports replay, logs, probe and study. Only commands imports it.
"""

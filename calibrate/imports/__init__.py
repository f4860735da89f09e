"""Profiles made of step costs that others measured.

It imports costs and files. Only commands imports it.
"""

"""Profiles imported from step costs that other projects measured.

It imports costs and files. Only commands imports it.
"""

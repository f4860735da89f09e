"""Profiles imported from step costs that other projects measured.

It imports probe, costs and files. Only commands imports it.
"""

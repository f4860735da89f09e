"""Replay scenarios on a backend or a server, simulate them, and compare.

It imports live, client, probe and runs. frames, api and commands import it.
"""

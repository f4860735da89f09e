"""Replay scenarios on a backend or a server, simulate them, and compare.

It imports live, client, probe, study and what these import. tune, frames, api and commands import it.
"""

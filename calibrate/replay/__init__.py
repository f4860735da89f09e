"""Replay scenarios on a backend or a server, simulate them, and compare."""

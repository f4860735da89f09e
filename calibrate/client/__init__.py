"""The load generator, the HTTP protocols that it speaks, and what a server counts itself.

It imports core only. endpoint, replay, server and commands import it.
"""

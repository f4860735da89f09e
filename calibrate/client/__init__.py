"""The load generator and the HTTP protocols it speaks.

It imports core only. endpoint, replay and server import it.
"""

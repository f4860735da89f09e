"""The load generator, the HTTP protocols that it speaks, and what a server counts itself."""

"""Installed serving engines in a worker process: their own schedulers decide, servesim pretends the model.

The worker side needs Python 3.9, the standard library and the engine. It imports core and device; commands import it.
"""

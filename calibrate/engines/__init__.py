"""Installed serving engines in a worker process: their own schedulers decide, servesim pretends the model."""

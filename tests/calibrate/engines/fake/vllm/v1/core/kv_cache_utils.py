"""Nothing to check."""

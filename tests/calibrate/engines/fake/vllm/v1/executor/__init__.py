"""Part of the small vLLM."""

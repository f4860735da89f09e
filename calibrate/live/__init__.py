"""Run a scenario on a backend: the driver, block tables, prompts, and the answers of a token check."""

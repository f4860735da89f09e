"""Calibrate a vLLM server from its recorded steps, and check the result on the server."""

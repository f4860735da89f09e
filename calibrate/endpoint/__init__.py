"""Calibrate a server that is reached only over HTTP, from the times of its tokens."""

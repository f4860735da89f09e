"""Data files."""

"""Optional packages: which extra installs them, and how. servesim is not on a package index."""

from __future__ import annotations

EXTRAS = {  # package -> extra of setup.cfg
    "aiohttp": "replay",
    "prometheus_client": "replay",
    "optuna": "search",
    "distributed": "cluster",
    "pyarrow": "parquet",
    "sentencepiece": "tokenizers",
    "tokenizers": "tokenizers",
    "torch": "torch",
}


def missing_package(package: str) -> str:
    """Return what to do about a package that is not installed."""
    extra = EXTRAS[package]
    return f"needs {package}, the extra `{extra}`: run pip install '.[{extra}]' in the clone of servesim"

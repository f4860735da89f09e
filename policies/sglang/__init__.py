"""SGLang."""

from .policy import SGLang

__all__ = ["SGLang"]

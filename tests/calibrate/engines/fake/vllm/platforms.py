"""The platform."""

from types import SimpleNamespace

current_platform = SimpleNamespace(check_and_update_config=None)

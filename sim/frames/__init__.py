"""Results of the Python API as pandas frames, with charts and HTML for notebooks.

It imports report and the packages below it, and parts of calibrate. api and commands import it.
"""

from .profile import ProfileFrames
from .replay import ReplayResult
from .sweep import SweepResult

__all__ = ["Calibration", "ProfileFrames", "Replay", "ReplayResult", "Sweep", "SweepResult"]
Sweep, Replay, Calibration = SweepResult, ReplayResult, ProfileFrames  # names of 0.1

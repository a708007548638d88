"""Measures where the time of training steps goes, by operator and by module of the model."""

from .profile import ModuleTime, OperatorTime, Profile
from .recorder import Profiler

__all__ = ["ModuleTime", "OperatorTime", "Profile", "Profiler"]

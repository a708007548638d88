"""Measures where the time of training steps goes, by operator and by module of the model.

torch.profiler knows neither ONNX Runtime's kernels nor the modules and passes that operators belong to, and costs more:
a step of 408 us on PyTorch's kernels, with 101 operators, takes 440 us measured here and 599 us measured by it. It also
takes 0.13 s to sum the events of a step with 606 operators, and ends a profile of the user's own around it.
"""

from .profile import ModuleTime, OperatorTime, Profile
from .recorder import Profiler

__all__ = ["ModuleTime", "OperatorTime", "Profile", "Profiler"]

"""Lets scripts of the legacy trainer run unchanged: :func:`install` puts the old import paths in place.

Nothing outside of this package depends on it.
"""

import importlib.util
import sys

__all__ = ["install", "uninstall"]


def install() -> None:
    """Makes the legacy import paths work, for scripts written for ``onnxruntime.training``.

    Registers ``onnxruntime.training`` with its submodules ``amp``, ``optim``, ``checkpoint``, ``orttrainer``,
    ``orttrainer_options`` and ``model_desc_validation``, the older API ``onnxruntime.capi.ort_trainer``,
    ``onnxruntime.TrainingSession`` with ``TrainingParameters``, ``onnxruntime.training.artifacts``, and as
    ``onnxruntime.training.api`` the classes of ``ort_trainer.api``; where torch is not installed, the last alone. An
    installed onnxruntime-training keeps whatever else it has in these modules (ORTModule, ``FusedAdam``, ...). Call it
    before the first of the old imports; a second call does nothing.

    Example:
        >>> import ort_trainer.compat
        >>> ort_trainer.compat.install()
        >>> from onnxruntime.training import ORTTrainer, ORTTrainerOptions, optim
    """
    if importlib.util.find_spec("torch") is None:
        from .training_api import install_alone

        install_alone()
    else:
        from .registry import install_all

        install_all()


def uninstall() -> None:
    """Undoes :func:`install`: modules that it made are gone, names that it set are what they were."""
    if f"{__name__}.registry" in sys.modules:
        from .registry import uninstall_all

        uninstall_all()
    else:
        from .modules import restore

        restore()

"""Runs scripts of the legacy trainer unchanged: :func:`install` provides the old import paths.

No other part of ``ort_trainer`` depends on this package.
"""

import importlib.util
import sys

__all__ = ["install", "uninstall"]


def install() -> None:
    """Provides the legacy import paths, for scripts written for ``onnxruntime.training``.

    Registers ``onnxruntime.training`` with its submodules ``amp``, ``optim``, ``checkpoint``, ``orttrainer``,
    ``orttrainer_options`` and ``model_desc_validation``, the older API ``onnxruntime.capi.ort_trainer``,
    ``onnxruntime.TrainingSession`` with ``TrainingParameters``, ``onnxruntime.training.artifacts``, and
    ``onnxruntime.training.api`` with the classes of ``ort_trainer.api``. Without torch, it registers only the last. An
    installed onnxruntime-training keeps its other names in these modules (``FusedAdam``, ...). Importing
    a part that is missing or broken raises an error that says what to use instead. Call it before the first of the old
    imports; a second call does nothing.

    Example:
        >>> import ort_trainer.compat
        >>> ort_trainer.compat.install()
        >>> from onnxruntime.training import ORTTrainer, ORTTrainerOptions, optim
    """
    if importlib.util.find_spec("torch") is None:
        from .modules import module_named

        module_named("onnxruntime")  # imports it with the precautions, before the next line does so without
        from .training_api import install_alone

        install_alone()
    else:
        from .registry import install_all

        install_all()


def uninstall() -> None:
    """Undoes :func:`install`: removes the modules that it created, and restores the names that it set."""
    if f"{__name__}.registry" in sys.modules:
        from .registry import uninstall_all

        uninstall_all()
    else:
        from .modules import restore

        restore()

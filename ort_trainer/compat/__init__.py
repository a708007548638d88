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
    from .modules import is_changed, module_named, put_in_place

    if is_changed():
        return
    try:
        if importlib.util.find_spec("torch") is None:
            module_named("onnxruntime")  # imports it with the precautions, before the next line does so without
            from .training_api import training_api_names

            put_in_place(training_api_names())
        else:
            from .registry import install_all

            install_all()
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Undoes :func:`install`: removes the modules that it created, and restores the names that it set."""
    from .modules import restore

    restore()
    options = sys.modules.get(f"{__name__}.options")  # which needs torch
    if options is not None:
        options.device_defaults.clear()

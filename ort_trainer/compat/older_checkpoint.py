"""The checkpoint functions of ``onnxruntime.capi.ort_trainer``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .checkpoint import Folder, load_from_folder, save_in_folder

if TYPE_CHECKING:
    from .older_api import ORTTrainer

__all__ = ["load_checkpoint", "save_checkpoint"]

_OWN_STATE = "onnxruntime.capi.ort_trainer"  # a key among the user's values in a checkpoint
# Key of the saved state of a loss scaler -> its attribute, which scalers of other classes may lack.
_OF_SCALER = {"loss_scale": "loss_scale_", "stable_steps": "stable_steps_"}


def save_checkpoint(
    model: ORTTrainer,
    checkpoint_dir: Folder,
    checkpoint_prefix: str = "ORT_checkpoint",
    checkpoint_state_dict: Mapping[str, Any] | None = None,
    include_optimizer_state: bool = True,
) -> None:
    """Writes ``<checkpoint_prefix>.ort.pt`` into a folder; replaces an existing file, with a warning.

    Args:
        model: The trainer.
        checkpoint_dir: The folder; it must exist.
        checkpoint_prefix: The beginning of the file's name.
        checkpoint_state_dict: Your own values, which :func:`load_checkpoint` returns. It is not changed.
        include_optimizer_state: Whether to write moments, too.
    """
    values = {} if checkpoint_state_dict is None else checkpoint_state_dict
    if not isinstance(values, Mapping):
        raise TypeError(f"checkpoint_state_dict must be a dict or None, but {values!r} was given")
    values = {**values, _OWN_STATE: _own_state(model)}
    save_in_folder(model.trainer, checkpoint_dir, checkpoint_prefix, values, include_optimizer_state)


def load_checkpoint(
    model: ORTTrainer, checkpoint_dir: Folder, checkpoint_prefix: str = "ORT_checkpoint", strict: bool = False
) -> dict[str, Any]:
    """Restores what :func:`save_checkpoint` wrote, including ``global_step_`` and the ``LossScaler``.

    A file of the current ``ORTTrainer.save_checkpoint`` has neither: they stay unchanged, with a warning.

    Args:
        model: The trainer.
        checkpoint_dir: The folder.
        checkpoint_prefix: The beginning of the file's name.
        strict: Whether names must match exactly.

    Returns:
        Your own values.

    Raises:
        FileNotFoundError: If the file does not exist.
        CheckpointError: If it is damaged, or a pickle that the legacy function wrote.
    """
    values = load_from_folder(model.trainer, checkpoint_dir, checkpoint_prefix, strict)
    _restore_own_state(model, values.pop(_OWN_STATE, None))
    return values


def _own_state(trainer: ORTTrainer) -> dict[str, Any]:
    """Returns the state of the older trainer that the current one does not have."""
    scaler = trainer.loss_scaler_
    known = {key: getattr(scaler, name, None) for key, name in _OF_SCALER.items()}
    state = None if scaler is None else {key: value for key, value in known.items() if value is not None}
    return {"global_step": trainer.global_step_, "loss_scaler": state}


def _restore_own_state(trainer: ORTTrainer, state: Any) -> None:
    """Restores what :func:`_own_state` returned, and warns about missing values."""
    state = state if isinstance(state, Mapping) else {}
    step, saved, scaler = state.get("global_step"), state.get("loss_scaler"), trainer.loss_scaler_
    kept = []
    if isinstance(step, int):
        trainer.global_step_ = step
    else:
        kept.append(f"global_step_ stays {trainer.global_step_}")
    own = {key: name for key, name in _OF_SCALER.items() if hasattr(scaler, name)}
    if scaler is not None and isinstance(saved, Mapping) and saved.keys() >= own.keys():
        for key, name in own.items():
            setattr(scaler, name, type(getattr(scaler, name))(saved[key]))
    elif scaler is not None:
        kept.append(f"loss_scaler_ keeps the scale {scaler.loss_scale_}")
    if kept:
        warnings.warn(
            f"the checkpoint lacks part of this trainer's state: {', '.join(kept)}", UserWarning, stacklevel=3
        )

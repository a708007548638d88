"""The part of ``ORTTrainer`` that reads and writes its state: parameters, gradients, state dicts, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .checkpoint import PathOrFile, load_checkpoint_file, save_checkpoint_file
from .errors import CheckpointError, shown, warn
from .training import state, tensors
from .training.inference_mode import outside_inference_mode
from .training.loop import TrainingLoop

__all__ = ["TrainerState"]


class TrainerState:
    """The methods of :class:`~ort_trainer.ORTTrainer` for its state."""

    _loop: TrainingLoop

    @outside_inference_mode
    def get_parameter(self, name: str) -> torch.Tensor:
        """Returns a copy of a parameter, trained or not, on the CPU. A tied parameter has several names.

        Before the first step, this is its initial value.

        Raises:
            ValueError: If the model has no such parameter.
        """
        return tensors.get_parameter(self._loop, name)

    @outside_inference_mode
    def set_parameter(self, name: str, value: Any) -> None:
        """Sets a parameter to a copy of a tensor or array; its moments do not change.

        With several processes, all must set the same value, because each changes only its own weights.

        Raises:
            RuntimeError: Before the first step: change the model itself, or call :meth:`prepare` first.
            TypeError, ValueError: If the model has no such parameter, or shape or dtype differ.
        """
        tensors.set_parameter(self._loop, name, value)

    @outside_inference_mode
    def get_gradient(self, name: str) -> torch.Tensor | None:
        """Returns a copy of a parameter's gradient over the accumulation window so far, on the CPU.

        This is the gradient that an update would use now, before clipping: without the loss scale, and reduced
        according to ``batch.gradient_reduction``. Right after an update, it is the gradient that the update used, after
        clipping. Returns None before the first step, and for parameters that are not trained or do not affect the loss.
        With several processes, each gets the gradient of its own micro-batches, and after an update the gradient that
        the update used; with ZeRO, None after an update, because no process has all of it.

        Raises:
            ValueError: If the model has no such parameter.
        """
        return tensors.get_gradient(self._loop, name)

    @outside_inference_mode
    def set_gradient(self, name: str, value: Any) -> None:
        """Sets a parameter's gradient over the window so far to a copy of a tensor or array; see get_gradient.

        With several processes, it sets the gradient of this process only.

        Raises:
            RuntimeError: If the window has no micro-batch yet: the first one would overwrite the gradient.
            TypeError, ValueError: If the parameter is unknown or not trained, or shape or dtype differ.
        """
        tensors.set_gradient(self._loop, name, value)

    @outside_inference_mode
    def state_dict(self, pytorch_format: bool = False) -> dict[str, Any]:
        """Returns the state of the trainer as copies on the CPU.

        Args:
            pytorch_format: True for weights and buffers only, as in ``model.state_dict()``: name -> torch tensor. False
                for everything, as nested dicts with numpy arrays: ``model`` (``full_precision``), ``optimizer`` (for
                each weight the state of its rule, such as ``Moment_1``, and ``Update_Count``; for LAMB also
                ``shared_optimizer_state``), ``trainer_options``, ``train_step_info``, ``window`` (the accumulation
                window) and its ``gradients``, ``random``, and ``loss_scaler`` and ``lr_scheduler`` if there are any.
                An update count is the number of updates plus 1, as in the legacy trainer.

        Returns:
            The state. Before the first step there is none: this warns, and returns the loaded state that waits for the
            first step, or an empty dict. With several processes, all must call it, and each gets the complete state,
            even with ZeRO; ``random_states`` has the random states of all.
        """
        if self._loop.session is None:
            warn(state.NOT_INITIALIZED)
            return self._loop.pending_dict  # type: ignore[return-value]
        return state.to_pytorch(self._loop) if pytorch_format else state.collect(self._loop)

    @outside_inference_mode
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restores a state from :meth:`state_dict`, in either format, before or after the first step.

        It checks everything first: on an error, nothing has changed. With several processes, all must call it with the
        same state, which may come from another number of processes.

        Args:
            state_dict: The state, or the state dict of a PyTorch model, which restores weights and buffers only.
            strict: Whether names must match exactly; if False, only common names are restored.

        Raises:
            RuntimeError: If names do not match and ``strict`` is True, or if no name matches.
            TypeError, ValueError: If a value has the wrong type, shape or dtype, or belongs to another optimizer.
            DistributedError: If another process fails, or was given another state.
        """
        state.load(self._loop, lambda: state_dict, strict)

    def save_checkpoint(
        self,
        path: PathOrFile,
        user_dict: Mapping[str, Any] | None = None,
        include_optimizer_states: bool = True,
        overwrite: bool = False,
    ) -> None:
        """Writes the complete state to one safetensors file, atomically.

        With several processes, all must call it; one writes (rank 0 unless it has run out of data), and the others
        wait.

        Args:
            path: A path, or an open binary file.
            user_dict: Your own values, which :meth:`load_checkpoint` returns: dicts with str keys, lists, numbers,
                strings, bools, None, tensors and numpy arrays. (Tuples become lists.)
            include_optimizer_states: Whether to write moments and accumulated gradients too.
            overwrite: Whether to replace an existing file.

        Raises:
            RuntimeError: Before the first step.
            FileExistsError: If the path exists and ``overwrite`` is False.
            FileNotFoundError: If the folder does not exist.
            TypeError: If ``user_dict`` holds anything else.
            DistributedError: If another process could not write the file.
        """
        state.check_started(self._loop, "save_checkpoint")
        user_dict = {} if user_dict is None else user_dict
        state.save(
            self._loop, include_optimizer_states, lambda found: save_checkpoint_file(path, found, user_dict, overwrite)
        )

    def load_checkpoint(self, *paths: PathOrFile, strict: bool = True) -> dict[str, Any]:
        """Restores a checkpoint, before or after the first step.

        It also reads HDF5 files of the legacy ``ORTTrainer`` (with the extra ``legacy``), except for the user's dict in
        them, which is a pickle.

        Args:
            *paths: One file, as a path or an open binary file; for a legacy run with ZeRO, the files of all ranks.
            strict: As for :meth:`load_state_dict`.

        Returns:
            The user's dict.

        Raises:
            FileNotFoundError: If the file does not exist.
            CheckpointError: If the file is damaged, is not a checkpoint, or holds a value of the wrong kind. Nothing
                has changed then, as with the errors below.
            ImportError: If it is a legacy file and h5py is not installed.
            RuntimeError, ValueError: As :meth:`load_state_dict`, if the state does not fit this trainer.
        """
        if not paths:
            raise ValueError("Expected number of files to load: 1, got 0")
        user_dict: dict[str, Any] = {}
        was_read = False

        def read() -> dict[str, Any]:
            nonlocal was_read
            found, own = load_checkpoint_file(*paths)
            user_dict.update(own)
            was_read = True
            return found

        try:
            state.load(self._loop, read, strict, owned=True)
        except (TypeError, LookupError, AttributeError, ArithmeticError) as error:
            if not was_read:
                raise
            # The file is wrong, not an argument.
            names = ", ".join(shown(path) for path in paths)
            raise CheckpointError(f"{names} holds a value that is invalid in a checkpoint: {error}") from error
        return user_dict

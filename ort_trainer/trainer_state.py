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
    """What :class:`~ort_trainer.ORTTrainer` has of its state."""

    _loop: TrainingLoop

    @outside_inference_mode
    def get_parameter(self, name: str) -> torch.Tensor:
        """Returns a copy of a parameter, trained or not, on the CPU; a tied one has several names.

        Before the first step it is the value that training will begin with.

        Raises:
            ValueError: If the model has no such parameter.
        """
        return tensors.get_parameter(self._loop, name)

    @outside_inference_mode
    def set_parameter(self, name: str, value: Any) -> None:
        """Replaces the value of a parameter by a copy of a tensor or array; its moments stay as they are.

        Of several processes, all must set the same, as each changes its own weights only.

        Raises:
            RuntimeError: Before the first step: change the model itself then, or call :meth:`prepare` first.
            TypeError, ValueError: If the model has no such parameter, or shape or dtype differ.
        """
        tensors.set_parameter(self._loop, name, value)

    @outside_inference_mode
    def get_gradient(self, name: str) -> torch.Tensor | None:
        """Returns a copy of the gradient that the micro-batches of the window so far give a parameter, on the CPU.

        It is what an update right now would use, before clipping: without the loss scale, and reduced as
        ``batch.gradient_reduction`` says. Right after an update it is what that has used, after clipping. None where
        there is none: before the first step, and for parameters that are not trained or that the loss does not depend
        on. Of several processes, each sees what its own micro-batches give, and after an update what that has used;
        with ZeRO nothing then, as no process has it whole.

        Raises:
            ValueError: If the model has no such parameter.
        """
        return tensors.get_gradient(self._loop, name)

    @outside_inference_mode
    def set_gradient(self, name: str, value: Any) -> None:
        """Replaces the gradient of the window so far by a copy of a tensor or array, in the form of get_gradient.

        Of several processes, it replaces that of this one only.

        Raises:
            RuntimeError: If no micro-batch of a window has been run, so that the next one would overwrite it.
            TypeError, ValueError: If the parameter is unknown or not trained, or shape or dtype differ.
        """
        tensors.set_gradient(self._loop, name, value)

    @outside_inference_mode
    def state_dict(self, pytorch_format: bool = False) -> dict[str, Any]:
        """Returns the state of the trainer as copies on the CPU.

        Args:
            pytorch_format: True for the weights and buffers alone, as ``model.state_dict()`` has them: name -> torch
                tensor. False for everything, as nested dicts with numpy arrays: ``model`` (``full_precision``),
                ``optimizer`` (per weight what its rule keeps, such as ``Moment_1``, and ``Update_Count``; LAMB
                ``shared_optimizer_state``), ``trainer_options``, ``train_step_info``, ``window`` (the
                accumulation window) and its ``gradients``, ``random``, and ``loss_scaler`` and ``lr_scheduler`` where
                there are any. Update counts are updates done plus 1, as they always were.

        Returns:
            The state. Before the first step there is none: a warning is given, and the state that was loaded and waits
            for the first step is returned, or an empty dict. Of several processes all call this, and each gets the
            whole, also with ZeRO; ``random_states`` has the random states of all.
        """
        if self._loop.session is None:
            warn(state.NOT_INITIALIZED)
            return self._loop.pending_dict  # type: ignore[return-value]
        return state.to_pytorch(self._loop) if pytorch_format else state.collect(self._loop)

    @outside_inference_mode
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restores what :meth:`state_dict` returned, in either format; also before the first step.

        Everything is checked first: if anything does not fit, nothing has changed. Of several processes all call this,
        with the same state, which any number of them may have saved.

        Args:
            state_dict: The state, or the state dict of a PyTorch model, which restores weights and buffers only.
            strict: Whether names must match exactly; if not, only what both have is restored.

        Raises:
            RuntimeError: If names do not match and ``strict`` is True, or none does.
            TypeError, ValueError: If a value has a wrong type, shape, dtype, or belongs to another optimizer.
            DistributedError: If this fails in another process, or that was given another state.
        """
        state.load(self._loop, lambda: state_dict, strict)

    def save_checkpoint(
        self,
        path: PathOrFile,
        user_dict: Mapping[str, Any] | None = None,
        include_optimizer_states: bool = True,
        overwrite: bool = False,
    ) -> None:
        """Writes the whole state to one safetensors file, atomically.

        Of several processes all call this; one writes, rank 0 unless it has no data left, and the others wait.

        Args:
            path: A path, or an open binary file.
            user_dict: Values of your own that :meth:`load_checkpoint` gives back: dicts with str keys, lists, numbers,
                strings, bools, None, tensors and numpy arrays. (Tuples come back as lists.)
            include_optimizer_states: Whether to write moments and accumulated gradients too.
            overwrite: Whether a file that is there already may be replaced.

        Raises:
            RuntimeError: Before the first step.
            FileExistsError: If the path exists and ``overwrite`` is False.
            FileNotFoundError: If the folder does not exist.
            TypeError: If ``user_dict`` holds something else.
            DistributedError: If another process could not write the file.
        """
        state.check_started(self._loop, "save_checkpoint")
        user_dict = {} if user_dict is None else user_dict
        state.save(
            self._loop, include_optimizer_states, lambda found: save_checkpoint_file(path, found, user_dict, overwrite)
        )

    def load_checkpoint(self, *paths: PathOrFile, strict: bool = True) -> dict[str, Any]:
        """Restores a checkpoint; also before the first step.

        HDF5 files of the legacy ``ORTTrainer`` are read too (with the extra ``legacy``), but for the user's dict in
        them, which is a pickle.

        Args:
            *paths: The one file, as a path or an open binary file; of a legacy run with ZeRO the files of all ranks.
            strict: As for :meth:`load_state_dict`.

        Returns:
            The user's dict.

        Raises:
            FileNotFoundError: If there is no such file.
            CheckpointError: If the file is damaged, no checkpoint, or holds something of a wrong kind. Nothing has
                changed then, as with the errors below.
            ImportError: If it is a legacy file and h5py is not installed.
            RuntimeError, ValueError: As :meth:`load_state_dict`: what is in it does not fit this trainer.
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
            # What is wrong is not an argument but something in the file.
            names = ", ".join(shown(path) for path in paths)
            raise CheckpointError(f"{names} holds something that no checkpoint of a trainer has: {error}") from error
        return user_dict

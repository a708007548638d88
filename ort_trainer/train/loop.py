"""The step loop: forward and backward pass, accumulation window, loss scale, schedule, update, and their counters.

All interfaces of the trainer translate arguments and run this one loop.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..core.errors import shown
from ..core.interrupts import uninterrupted
from ..engine import Check, Executor, Plan
from ..engine.ownership import owned_dtype
from ..export import BORROWED, ModelSource
from ..optim import OptimizerConfig
from ..optim.parts import Named, global_norm
from ..optim.step_info import TrainStepInfo
from ..optim.torch_optimizer import TorchOptimizerConfig, TorchUpdate
from ..optim.update import Again, OptimizerUpdate
from ..options import ORTTrainerOptions
from ..profiling import Profile, Profiler
from ..step import Step
from .batch import Batch, check_indices, to_tensor
from .debug_files import check_graph_paths, save_graphs
from .learning_rates import learning_rates
from .precision import FiniteLosses, choose_precision
from .read_state import Contents, TrainerState, apply_to_executor
from .step_graphs import StepGraphs
from .strategy import Meeting, SingleProcess, Strategy
from .transaction import Transaction
from .user_objects import claim
from .window import AccumulationWindow, Share

__all__ = ["GRADIENT_WEIGHT", "TrainingLoop"]

GRADIENT_WEIGHT = "gradient_weight"
# Sections of the options, and keys of `distributed`, that may differ between processes.
_OWN = ("device", "debug", "session_options", "provider_options")
_RANKS = ("world_rank", "local_rank")

Outputs = list[torch.Tensor]


class TrainingLoop:
    """Trains one model, step by step.

    Args:
        source: The model with its loss.
        model_desc: The description as the user gave it, or ``"auto"``.
        config: The optimizer.
        options: All settings.
        device: Where training runs.
        strategy: How several processes work together; None for one process.

    Attributes:
        source, config, options, device: As given.
        graphs: The description and the graphs.
        window: The micro-batches since the last update.
        precision: Loss scale and check for finite gradients.
        rates: The learning rates.
        strategy: Combines the gradients of several processes.
        info: The counters.
        losses: Checks that losses are finite; None for no check.
        profiler: Measures steps while a profile is running; else None.
        contents: What its state consists of.
        holds_gradients: Whether ``p.grad`` holds gradients for an update.
        optimizer: Updates the weights; it exists as long as the executor.
    """

    def __init__(
        self,
        source: ModelSource,
        model_desc: Mapping[str, Any] | str,
        config: OptimizerConfig,
        options: ORTTrainerOptions,
        device: torch.device,
        strategy: Strategy | None = None,
    ) -> None:
        self.source, self.config, self.options = source, config, options
        self.device = device
        check_graph_paths(options.debug.graph_save_paths.to_dict())
        self.graphs = StepGraphs(source, model_desc, device, options.tolerates, self._graph_built, self._rebound)
        self.window = AccumulationWindow(options.batch.gradient_accumulation_steps, options.batch.gradient_reduction)
        self.precision = choose_precision(options.mixed_precision)
        self.rates = learning_rates(config, options.lr_scheduler)
        self.strategy = SingleProcess() if strategy is None else strategy
        self.info = TrainStepInfo(config)
        self.contents = Contents.of(source, config, device)
        limit = options.debug.max_nonfinite_losses
        self.losses = None if limit is None else FiniteLosses(limit)
        self._checks_indices = options.debug.check_indices
        self.profiler: Profiler | None = None
        self.holds_gradients = False
        self._pending: TrainerState | None = None
        self.pending_dict: Mapping[str, Any] = {}
        if self.window.reduction == "weighted" and GRADIENT_WEIGHT in self.graphs.possible_inputs():
            raise ValueError(
                f"batch.gradient_reduction 'weighted' reserves the argument {GRADIENT_WEIGHT!r} of train_step, but "
                "the model has an input of that name: rename the input"
            )
        traits = {}
        if self.strategy.world_size > 1:
            source.check_joint()
            config.check_joint(self.strategy.zero_stage)
            traits = self._traits()
        with BORROWED:
            tensors = {**source.parameters, **source.buffers}
            self._seed = self.strategy.begin(tensors, traits, torch.initial_seed())
        # A PyTorch model may change until the first step; an ONNX model is fixed, so its executor is created at once.
        self._executor = self._make_executor() if source.fixed else None
        # Last, so that a constructor that fails claims nothing.
        for thing, option in (
            (self.precision.scaler, "mixed_precision.loss_scaler"),
            (self.rates.scheduler, "lr_scheduler"),
            (getattr(config, "optimizer", None), "optim_config"),
        ):
            if hasattr(thing, "state_dict"):  # a function may serve any number of trainers
                claim(thing, self, option, options.refuse)

    @property
    def executor(self) -> Executor | None:
        """The executor with all tensors; None before the first step of a PyTorch model.

        Raises:
            RuntimeError: If a tensor of the model was replaced by one that the executor can't use.
        """
        if self._executor is not None:
            self.graphs.refresh(self._executor)
        return self._executor

    @property
    def pending(self) -> TrainerState | None:
        """The loaded state that is applied when training begins; None if there is none."""
        return self._pending

    def wait_with(self, restored: TrainerState, state_dict: Mapping[str, Any]) -> None:
        """Keeps a state to apply when training begins, merged over one kept earlier.

        Args:
            restored: The state.
            state_dict: As the user gave it.
        """
        restored = restored.over(self._pending)
        restored.tensors = dict(self.source.memory.put(restored.tensors))
        self._pending, self.pending_dict = restored, state_dict

    def prepare(self, batch: Batch, training: bool, names: Sequence[str], backward: bool = True) -> Plan:
        """Returns the plan that runs a step for a batch; makes the executor and the graph if needed.

        Args:
            batch: A checked batch, from ``graphs.bind``.
            training: Whether for :meth:`step`, or for evaluation.
            names: Outputs to return, from ``graphs.fetches``.
            backward: Whether a step computes gradients.

        Raises:
            ExportError: If the model can't be exported. The loop is unchanged then.
            TypeError: If a required input is missing.
        """
        if self._executor is None or not self.graphs.has_started:
            return self._start(batch, training, names, backward)
        return self.graphs.plan(self._executor, batch, training, names, backward)

    def plan(self, batch: Batch, training: bool, names: Sequence[str], backward: bool = True) -> Plan:
        """Calls :meth:`prepare` for a batch that is about to run, and checks its values.

        Raises:
            IndexError: If an index is out of range.
            ValueError: If losses are to be checked, but the loss is not fetched.
        """
        if self._executor is None or not self.graphs.has_started:
            plan = self._start(batch, training, names, backward)
        else:
            plan = self.graphs.plan(self._executor, batch, training, names, backward)
        if self.losses is not None and training and backward:
            self.losses.check_fetched(names, plan.runner.graph.loss)
        if plan.indices and self._checks_indices:
            check_indices(plan, batch)
        return plan

    def train(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Binds arguments to inputs and runs a :meth:`step`.

        Args:
            args: Arguments by position, as for ``ORTTrainer.train_step``.
            kwargs: Arguments by name, including the weight of the micro-batch if the window needs one.

        Returns:
            The outputs named in ``info.fetches``.
        """
        profiler = self.profiler
        if profiler is None:
            return self._train(args, kwargs)
        outputs = profiler.step(lambda: self._train(args, kwargs))
        if profiler.finished:
            self.profiler = None  # first, so that no later step is measured even if the report fails
            profiler.report()
        return outputs

    def _train(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        with Transaction(self) as transaction:
            weight = 1.0
            if GRADIENT_WEIGHT in kwargs or self.window.reduction == "weighted":
                weight, kwargs = self.take_weight(kwargs)
            fetches = self.info.fetches
            batch = self.graphs.bind(args, kwargs)
            plan = self.plan(batch, True, self.graphs.fetches(fetches))
            if self.profiler is not None:
                plan = self.profiler.plan(plan)
            return self._step(transaction, plan, batch, weight)

    def step(self, plan: Plan, batch: Batch, weight: float = 1.0, rates: Sequence[float] | None = None) -> Outputs:
        """Runs :meth:`backward` and, at the end of a window, :meth:`end_window`.

        Args:
            plan: From :meth:`prepare`, for this batch.
            batch: The batch.
            weight: The weight of the micro-batch in the window's mean.
            rates: Learning rates, one for all parameters or one per group and one for the others; None to take them
                from the schedule or config.

        Returns:
            The outputs that the plan fetches.
        """
        with Transaction(self) as transaction:
            return self._step(transaction, plan, batch, weight, rates)

    def _step(
        self,
        transaction: Transaction,
        plan: Plan,
        batch: Batch,
        weight: float,
        rates: Sequence[float] | None = None,
    ) -> Outputs:
        again = None
        if self.config.needs_closure:
            if self.window.size > 1:
                raise RuntimeError(
                    f"{self.config.name} computes the loss several times in an update, but the batches of a window are "
                    "not kept: set gradient_accumulation_steps to 1, or write the loop with forward_backward() and "
                    "optimizer.step(closure)"
                )
            again = functools.partial(self._again, batch)
        transaction.begin(self._executor, plan.runner.graph)
        # Before the run, because both may raise.
        if self.config.is_live:
            self.config.check()
        rates = self.rates.upcoming(self.info, self.info.step + 1) if rates is None else rates
        outputs, is_due = self._run(plan, batch, weight)
        if self.strategy.world_size > 1:
            transaction.commit()  # no process can roll back alone
        if is_due:
            self._end_window(rates, again, transaction)
        transaction.commit()
        return outputs

    def backward(self, plan: Plan, batch: Batch, weight: float = 1.0) -> Outputs:
        """Runs the forward and backward pass, adds to the window's gradients and counts the micro-batch.

        Args:
            plan: From :meth:`prepare`, for this batch.
            batch: The batch.
            weight: The weight of the micro-batch in the window's mean.

        Returns:
            The outputs that the plan fetches.
        """
        with Transaction(self, joint=False) as transaction:
            transaction.begin(self._executor, plan.runner.graph)
            outputs, _ = self._run(plan, batch, weight)
            transaction.commit()
            return outputs

    def _run(self, plan: Plan, batch: Batch, weight: float) -> tuple[Outputs, bool]:
        """Runs the forward and backward pass; returns the outputs, and whether the weights are due for an update."""
        executor, window = self._executor, self.window
        scale = 1.0 if self.precision.scaler is None else self.precision.loss_scale
        assert executor is not None
        if self.optimizer.shows_gradients:
            self._release_shown(executor)
        check = None if self.losses is None else self.losses.check
        outputs = executor.train(plan, batch, loss_scale=window.factor(weight, scale), check=check)
        if plan.runner.graph.buffer_updates:
            self.source.memory.publish(plan.runner.graph.buffer_updates)
        is_due = window.add(weight, scale)
        self.info.step += 1
        return outputs, is_due

    def gradients_of(
        self, plan: Plan, batch: Batch, check: Check | None = None
    ) -> tuple[Outputs, dict[str, torch.Tensor]]:
        """Runs the forward and backward pass; changes only the random state and buffers.

        Args:
            plan: From :meth:`plan`, for this batch.
            batch: The batch.
            check: Called with the outputs before any change; may raise.

        Returns:
            The outputs that the plan fetches, and the gradients of the loss by parameter name, as new tensors.
        """
        assert self._executor is not None
        scale = self.precision.loss_scale
        if self.optimizer.shows_gradients:
            self._release_shown(self._executor)
        outputs, gradients = self._executor.gradients_of(plan, batch, loss_scale=scale, check=check)
        if scale != 1.0 and gradients:
            torch._foreach_div_(list(gradients.values()), scale)
        self.source.memory.publish(plan.runner.graph.buffer_updates)
        return outputs, gradients

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs:
        """Runs the model in training mode; see ``ORTTrainer.forward``."""
        with Transaction(self, joint=False) as transaction:
            batch = self.graphs.bind(args, kwargs)
            plan = self.plan(batch, True, self.graphs.fetches(self.info.fetches), backward=False)
            assert self._executor is not None
            transaction.begin(self._executor, plan.runner.graph)
            outputs = self._executor.forward(plan, batch)
            self.source.memory.publish(plan.runner.graph.buffer_updates)
            transaction.commit()
            return outputs

    def forward_backward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs:
        """Adds gradients to ``p.grad``; see ``ORTTrainer.forward_backward``."""
        with Transaction(self) as transaction:
            if self.window.micro_batches:
                raise RuntimeError(
                    f"forward_backward() was called after {self.window.micro_batches} of {self.window.size} "
                    "micro-batches of a train_step() window, whose gradients are not in p.grad: end the window with "
                    "optimizer_step() first"
                )
            self._check_not_joining("forward_backward")
            self.source.memory.add_gradients({})  # raises early if the model can't hold gradients
            batch = self.graphs.bind(args, kwargs)
            plan = self.plan(batch, True, self.graphs.fetches(self.info.fetches))
            executor, strategy = self.start_executor(), self.strategy
            transaction.begin(executor, plan.runner.graph)
            outputs, gradients = self.gradients_of(plan, batch, None if self.losses is None else self.losses.check)
            transaction.commit()
            if strategy.world_size > 1:
                meeting = strategy.meet("pass", Share(1.0), (), gradients, executor.changed_buffers)
                gradients = strategy.average(meeting, gradients)
                strategy.spread(meeting, {}, executor.buffers)
                self.source.memory.publish(executor.buffers)
            self.source.memory.add_gradients(gradients)
            self.holds_gradients = True
            return outputs

    def optimizer_step(self) -> bool:
        """Updates the weights with the gradients so far; see ``ORTTrainer.optimizer_step``."""
        with Transaction(self) as transaction:
            alone = self.strategy.world_size == 1  # otherwise others may have micro-batches, so all run the update
            in_window = bool(self.window.micro_batches) or not (alone or self.holds_gradients)
            if not in_window and not self.holds_gradients:
                return False
            if self.executor is None and self.pending is not None and alone:
                raise RuntimeError(
                    "the loaded accumulation window is applied when training begins: call prepare() before "
                    "optimizer_step()"
                )
            if self.config.needs_closure:
                raise RuntimeError(
                    f"{self.config.name} computes the loss several times in an update: call optimizer.step(closure) "
                    "yourself, with a closure that calls forward_backward(), or train_step()"
                )
            if not in_window:
                self._check_not_joining("optimizer_step")
            transaction.begin()
            if in_window:
                return self.end_window()
            gradients = self.source.memory.gradients()
            if alone and not gradients:
                return False
            self.config.check()
            rates = self.rates.upcoming(self.info, self.info.step)
            meeting = self.strategy.meet("step", Share(float(bool(gradients))), rates, gradients)
            return self._update(meeting, gradients, of_window=False)

    def end_window(self, rates: Sequence[float] | None = None) -> bool:
        """Updates the weights with the gradients of the window so far, complete or not, and ends the window.

        Args:
            rates: As for :meth:`step`.

        Returns:
            Whether all gradients were finite; if not, the weights are unchanged. True if this was not checked.

        Raises:
            RuntimeError: If the window has no micro-batch. (With several processes, some may have none.)
        """
        if self.strategy.world_size == 1 and (self._executor is None or not self.window.micro_batches):
            raise RuntimeError("there are no gradients to update the weights with: run a backward pass first")
        self.config.check()
        rates = self.rates.upcoming(self.info, self.info.step) if rates is None else rates
        return self._end_window(rates)

    def follow_update(self, meeting: Meeting) -> None:
        """Takes part in an update of the other processes, with the rest of a window or nothing."""
        self.rates.upcoming(self.info, self.info.step)  # advances the schedule
        self._update(meeting, self.start_executor().present_gradients(), of_window=True)

    def _end_window(
        self, rates: Sequence[float], again: Again | None = None, transaction: Transaction | None = None
    ) -> bool:
        present = (self._executor or self.start_executor()).present_gradients()
        return self._update(self.meet("update", rates, present), present, True, again, transaction)

    def meet(self, kind: str, rates: Sequence[float] = (), present: Named | None = None) -> Meeting:
        """Meets the other processes with the window's share, and sets ``step`` to the highest of all processes.

        Args:
            kind: As in :class:`Meeting`.
            rates: The learning rates.
            present: The gradients of the window so far; None to get them from the executor.
        """
        executor, window, info = self._executor or self.start_executor(), self.window, self.info
        share = window.share() if window.micro_batches else Share(0.0, scale=self.precision.loss_scale)
        present = executor.present_gradients() if present is None else present
        meeting = self.strategy.meet(kind, share, rates, present, executor.changed_buffers, info.step)
        info.step = meeting.step
        return meeting

    def _update(
        self,
        meeting: Meeting,
        gradients: Named,
        of_window: bool,
        again: Again | None = None,
        transaction: Transaction | None = None,
    ) -> bool:
        """Reduces the gradients, updates the weights and counts the update.

        Args:
            meeting: What the processes agreed on.
            gradients: This process's gradients by parameter name; they are divided and clipped in place.
            of_window: Whether they are those of the window, which are reduced first.
            again: Recomputes the loss and gradients.
            transaction: The step's, which is committed when the weights have changed.

        Returns:
            As :meth:`end_window`.
        """
        executor, optimizer, info, strategy = (
            self._executor or self.start_executor(),
            self.optimizer,
            self.info,
            self.strategy,
        )
        if strategy.world_size > 1 and not meeting.weight:
            return False
        if self.config.is_live:
            self.config.set_rates(meeting.rates)
        divisor, checks_finite = 1.0, self.precision.checks_finite
        if of_window:
            own = gradients
            gradients, share = strategy.reduce(meeting, own)
            divisor = self.window.divisor_of(share)
            # With ZeRO no process has the complete sums, so there are no used gradients to show.
            executor.hold_gradients(None if gradients is own else {} if strategy.zero_stage else gradients)
            keeps = not strategy.zero_stage
        else:
            gradients, keeps = optimizer.parts.of(gradients), False
        norm = None
        if gradients and not keeps and not (checks_finite or optimizer.asks_norm):
            # If the user may change the gradients, or they are in parts, the norm is computed now.
            norm = optimizer.parts.total_norm(gradients.values()) / divisor
        run = optimizer.step if self.profiler is None else functools.partial(self.profiler.update, optimizer.step)
        try:
            info.all_finite = run(
                gradients=gradients,
                learning_rates=list(map(float, meeting.rates)),
                divisor=divisor,
                check_finite=checks_finite,
                again=again,
            )
        finally:  # the gradients were divided in place, even if the update failed
            self.window.reset()
            executor.lazy_reset_grad()
        if strategy.world_size > 1:
            updated = {name: executor.parameters[name] for name in gradients} if info.all_finite else {}
            strategy.spread(meeting, updated, executor.buffers)
            self.source.memory.publish(executor.buffers)
        norm = optimizer.norm if norm is None else norm
        if self.contents.torch_config is None:
            self.source.memory.publish(executor.parameters)
        else:  # the PyTorch optimizer changed the model itself
            self.graphs.refresh(executor)
        self.holds_gradients = False
        info.note_update(meeting.rates, functools.partial(_norm_of_used, executor) if norm is None else norm)
        try:
            if self.precision.scaler is not None:
                self.precision.update(info)
        finally:
            info.optimization_step += int(info.all_finite)
            if transaction is not None and info.all_finite:
                transaction.commit()
        if info.all_finite and self.rates.scheduler is not None:
            self.rates.updated()
        return info.all_finite

    def discard_gradients(self) -> None:
        """Ends the window without an update."""
        self.window.reset()
        if self._executor is not None:
            self._executor.lazy_reset_grad()

    def lazy_reset_grad(self) -> None:
        """Drops all gradients that an update would use; see ``ORTTrainer.lazy_reset_grad``."""
        with Transaction(self, joint=False) as transaction:
            transaction.begin()
            self.discard_gradients()
            self.holds_gradients = False
            self.source.memory.drop_gradients()
            waiting = self._pending
            if waiting is not None and waiting.gradients is not None:
                waiting.gradients = {}
                self.pending_dict = {**self.pending_dict, "gradients": {}, "window": self.window.state_dict()}

    def get_parameter(self, name: str) -> torch.Tensor:
        """Returns a copy of a parameter on the CPU; see ``ORTTrainer.get_parameter``."""
        canonical = self._canonical(name)
        if self.executor is not None:
            return self.executor.parameters[canonical].cpu().clone()
        waiting = {} if self.pending is None else self.pending.tensors
        with BORROWED:
            value = waiting.get(canonical, self.source.parameters[canonical]).detach()
            return value.to("cpu", owned_dtype(value.dtype), copy=True)

    def set_parameter(self, name: str, value: Any) -> None:
        """Replaces the value of a parameter; see ``ORTTrainer.set_parameter``."""
        canonical = self._canonical(name)
        current = self._started("set_parameter").parameters[canonical]
        current.copy_(_fitting(current, name, value))
        self.source.memory.publish([canonical])

    def get_gradient(self, name: str) -> torch.Tensor | None:
        """Returns a copy of a gradient accumulated in the window so far; see ``ORTTrainer.get_gradient``."""
        canonical = self._canonical(name)
        executor = self.executor
        if executor is None:
            return None
        if self.window.micro_batches:
            found = executor.present_gradients().get(canonical)
            return None if found is None else found.cpu() / self.window.divisor
        used = executor.used_gradients().get(canonical)
        return None if used is None else used.cpu().clone()

    def set_gradient(self, name: str, value: Any) -> None:
        """Replaces a gradient accumulated in the window so far; see ``ORTTrainer.set_gradient``."""
        canonical = self._canonical(name)
        if canonical not in self.source.trainable:
            raise ValueError(f"{name!r} is not trained, so it has no gradient")
        executor = self._started("set_gradient")
        if not self.window.micro_batches:
            raise RuntimeError(
                "there are no gradients now: call set_gradient() inside an accumulation window, after its first "
                "micro-batch and before the update"
            )
        checked = _fitting(executor.parameters[canonical], name, value)
        executor.restore_gradients({**executor.present_gradients(), canonical: checked * self.window.divisor})

    def _canonical(self, name: str) -> str:
        """Returns the canonical (first) name of a parameter."""
        if not isinstance(name, str):
            raise TypeError(
                f"the name of a parameter must be a str, but {shown(name)} ({type(name).__name__}) was given"
            )
        canonical, parameters = self.source.canonical, self.source.parameters
        if canonical.get(name) not in parameters:
            names = sorted(own for own, first in canonical.items() if first in parameters)
            raise ValueError(f"{name!r} is not a parameter of the model, which has {names}")
        return canonical[name]

    def _started(self, method: str) -> Executor:
        if self.executor is None:
            raise RuntimeError(
                f"training has not started: call prepare(), train_step() or eval_step() before {method}(), or change "
                "the model itself"
            )
        return self.executor

    def evaluate(self, args: Sequence[Any], kwargs: Mapping[str, Any], fetches: Sequence[str]) -> Outputs:
        """Binds arguments to inputs and runs the model in evaluation mode; changes nothing.

        Args:
            args: Arguments by position, as for ``ORTTrainer.eval_step``.
            kwargs: Arguments by name.
            fetches: Outputs to return; all if empty. Inputs that they do not need may be left out.

        Returns:
            The outputs.
        """
        with Transaction(self, joint=False):
            batch = self.graphs.bind(args, kwargs, partly=bool(fetches))
            plan = self.plan(batch, False, self.graphs.fetches(fetches))
            assert self._executor is not None
            return self._executor.evaluate(plan, batch)

    def begin_profile(self, steps: int, trace: str | os.PathLike[str] | None) -> Profile:
        """Measures the next calls of :meth:`train`; see ``ORTTrainer.profile``.

        Raises:
            RuntimeError: If a profile is already running.
            TypeError, ValueError, OSError: If an argument is invalid.
        """
        if self.profiler is not None:
            running = self.profiler.profile
            raise RuntimeError(
                f"a profile of {running.steps} steps is running, with {running.left} left: call train_step that often, "
                "then profile() again"
            )
        self.profiler = Profiler(steps, trace, self.device, self.strategy.world_rank)
        return self.profiler.profile

    def take_weight(self, kwargs: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
        """Returns the weight of the micro-batch in the window's mean, and the other arguments."""
        if self.window.reduction == "weighted":
            others = {name: value for name, value in kwargs.items() if name != GRADIENT_WEIGHT}
            return self.window.checked_weight(kwargs.get(GRADIENT_WEIGHT)), others
        if GRADIENT_WEIGHT in kwargs and GRADIENT_WEIGHT not in self.graphs.possible_inputs():
            raise TypeError(
                f"{GRADIENT_WEIGHT} was given, but batch.gradient_reduction is {self.window.reduction!r}: set it to "
                "'weighted'"
            )
        return 1.0, kwargs

    def _check_not_joining(self, method: str) -> None:
        if self.strategy.joining:
            raise RuntimeError(
                f"{method}() was called inside trainer.join() with gradients in p.grad, but a process without data can "
                "only take part in train_step(): use that, or give all processes the same number of batches and leave "
                "out trainer.join()"
            )

    def _make_executor(self) -> Executor:
        """Returns an executor, which owns or shares the model's tensors; sets the optimizer that updates them."""
        source, config, options = self.source, self.config, self.options
        parameters, buffers = source.parameters, source.buffers
        tensors = source.memory.adopt(self.device)
        trainable = {name: tensors[name] for name in source.trainable}
        memory, parts = self.strategy.lay_out(trainable)
        executor = Executor(
            {name: tensors[name] for name in parameters},
            {name: tensors[name] for name in buffers},
            device=self.device,
            given_options=options.session_options,
            deterministic=options.debug.deterministic_compute,
            provider_options=options.provider_options,
            mem_limit=options.memory_limit(self.device),
            seed=None if options.utils.random_numbers == "pytorch_global" else self._seed,
            gradient_memory=memory,
        )
        update = TorchUpdate if isinstance(config, TorchOptimizerConfig) else OptimizerUpdate
        self.optimizer: OptimizerUpdate = update(
            config,  # type: ignore[arg-type]
            trainable,
            {name: config.group_of(*names) for name, names in source.names_of_trainable().items()},
            clip=options.utils.grad_norm_clip,
            max_norm=options.utils.max_grad_norm,
            max_value=options.utils.max_grad_value,
            parts=parts,
        )
        return executor

    def _again(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the loss and gradients of a batch with the current weights."""
        assert self._executor is not None
        plan = self.graphs.plan(self._executor, batch, True, [self.graphs.description.loss.name])
        (loss,), gradients = self.gradients_of(plan, batch)
        return loss, gradients

    def _start(self, batch: Batch, training: bool, names: Sequence[str], backward: bool) -> Plan:
        """Makes the executor and the first graph; stores them last, so that a failure leaves the loop unchanged."""
        missing = [name for name in self.graphs.description.input_names if name not in batch]
        if missing:
            raise TypeError(f"inputs {missing} are missing: the first step needs all inputs to export the model")
        executor = self._executor or self._make_executor()
        if self.options.debug.check_model_export and not self.source.fixed:
            self.graphs.check_export(executor, batch)
        plan = self.graphs.plan(executor, batch, training, names, backward)
        with uninterrupted():
            self._take_executor(executor)
            self.graphs.started(batch)
            self.strategy.started({name: str(value.dtype) for name, value in batch.items()})
        return plan

    def start_executor(self) -> Executor:
        """Returns the executor; makes it if there is none yet."""
        if self._executor is None:
            self._take_executor(self._make_executor())
        assert self._executor is not None
        return self._executor

    def _take_executor(self, executor: Executor) -> None:
        if self._pending is not None:
            apply_to_executor(self._pending, executor, self.optimizer)
            self.source.memory.publish({*executor.parameters, *executor.buffers})
            self._pending, self.pending_dict = None, {}
        self._executor = executor

    def _release_shown(self, executor: Executor) -> None:
        """Removes the gradients that the last update used from ``p.grad``, if a new window begins."""
        if executor.starts_over:
            self.optimizer.forget(executor.used_gradients())

    def _rebound(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.optimizer.rebind(tensors)

    def _graph_built(self, executor: Executor, graph: Step) -> None:
        """Handles a new graph; for the first training graph, writes the files of ``debug.graph_save_paths``."""
        self.precision.name_input(graph)
        if graph.training and len(executor.graphs(True)) == 1 and not self.strategy.world_rank:  # same on all ranks
            accumulate, check_finite = self.window.size > 1, self.precision.checks_finite
            save_graphs(self.options, graph, executor, self.optimizer, self.config, accumulate, check_finite)

    def _traits(self) -> dict[str, Any]:
        """Returns the settings that must be equal in all processes, as JSON values by their names in messages."""
        source, config, graphs = self.source, self.config, self.graphs
        tensors = {**source.parameters, **source.buffers}
        aliases = source.names_of_trainable()
        options = {name: value for name, value in self.options.to_dict().items() if name not in _OWN}
        options["distributed"] = {name: value for name, value in options["distributed"].items() if name not in _RANKS}
        described = bool(graphs.output_names)  # otherwise the description is derived from the first batch
        return {
            "the parameters and buffers": {
                name: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
                for name, value in tensors.items()
            },
            "the parameters that are trained": dict.fromkeys(aliases, "trained"),
            "the optimizer": config.name,
            "the learning rates": config.learning_rates,
            "the hyper-parameters": {
                name: _json(config.hyper_parameters(config.group_of(*names))) for name, names in aliases.items()
            },
            "the options": _json(options),
            "the inputs of the model": graphs.description.input_names if described else None,
            "the outputs of the model": list(graphs.output_names) or None,
        }


def _norm_of_used(executor: Executor) -> torch.Tensor | None:
    """Returns the global norm of the gradients that the last update used; None if they are gone."""
    used = executor.used_gradients()
    return global_norm(used.values()) if used else None


def _json(value: Any) -> Any:
    """Converts a value to JSON types; an object becomes the name of its class or function."""
    if isinstance(value, Mapping):
        return {str(key): _json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)


def _fitting(current: torch.Tensor, name: str, value: Any) -> torch.Tensor:
    """Checks the shape and dtype of a value against a parameter's, and moves it to the parameter's device."""
    given = to_tensor(name, value)
    given = given.to(owned_dtype(given.dtype))
    if given.shape != current.shape or given.dtype != current.dtype:
        raise ValueError(
            f"{name!r} has shape {list(current.shape)} and dtype {current.dtype}, but {list(given.shape)} and "
            f"{given.dtype} were given"
        )
    return given.to(current.device)

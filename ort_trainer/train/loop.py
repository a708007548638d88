"""The step loop: forward and backward pass, accumulation window, loss scale, schedule, update, and their counters.

All interfaces of the trainer translate arguments and run this one loop.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..capture.borrow import BORROWED
from ..core.interrupts import uninterrupted
from ..core.report import GraphRuns, Report, memory_of
from ..core.threads import OneThread
from ..engine import Check, Executor, Request
from ..export.model import ModelSource
from ..optim import OptimizerConfig
from ..optim.followed_update import FollowedUpdate
from ..optim.parts import Named, global_norm
from ..optim.step_info import TrainStepInfo
from ..optim.torch_optimizer import FollowedConfig, TorchOptimizerConfig, TorchUpdate
from ..optim.update import OptimizerUpdate
from ..options import ModelDescription, ORTTrainerOptions
from ..profiling import Profile, Profiler
from ..step import Step
from .batch import Batch
from .calls import Call, Calls
from .contents import contents_of
from .debug_files import check_graph_paths, save_graphs
from .learning_rates import learning_rates
from .padding import PaddingCheck
from .precision import FiniteLosses, choose_precision
from .step_graphs import StepGraphs
from .strategy import AccumulationWindow, Arrival, Meeting, Share, Strategy
from .traits import traits_of
from .transaction import Transaction, in_transaction
from .user_objects import claim
from .verify import StepVerifier

GRADIENT_WEIGHT = "gradient_weight"

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
        one_thread: Refuses transactions of a second thread.
        transaction: The transaction that runs, the innermost one; None outside.
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
        self.one_thread = OneThread(f"the trainer of {source.name}")
        self.transaction: Transaction | None = None
        self.source, self.config, self.options = source, config, options
        self.device = device
        check_graph_paths(options.debug.graph_save_paths.to_dict())
        options.cuda_graphs(device)  # checks it
        draws_as_pytorch = options.utils.random_numbers != "fast"
        self.graphs = StepGraphs(
            source, model_desc, device, options.tolerates, self._graph_built, self._rebound, draws_as_pytorch
        )
        self.precision, batch = choose_precision(options.mixed_precision), options.batch
        is_scaled = self.precision.scaler is not None
        self.window = AccumulationWindow(batch.gradient_accumulation_steps, batch.gradient_reduction, is_scaled)
        self.rates = learning_rates(config, options.lr_scheduler)
        self.strategy = Strategy() if strategy is None else strategy
        self.info = TrainStepInfo(config)
        self.contents = contents_of(source, config, device, self.window.given_size)
        if options.utils.moments != "float32" and isinstance(config, TorchOptimizerConfig):
            raise ValueError(
                f"utils.moments {options.utils.moments!r} has no effect on {type(config.optimizer).__name__}, which "
                "keeps its own state: leave it out, or use a config of ort_trainer.optim"
            )
        limit = options.debug.max_nonfinite_losses
        self.losses = None if limit is None else FiniteLosses(limit)
        mask, tolerance = options.utils.remove_padding, 5e-2 if self.precision.mixed else 1e-3
        every = options.verification()
        self._verifier = StepVerifier(every, self.graphs, self.precision.checks_finite, bool(mask)) if every else None
        self._calls = Calls(self.graphs, device, options.debug.check_indices, self._verifier)
        self._padding = PaddingCheck(mask, self.graphs, tolerance) if mask else None
        self.profiler: Profiler | None = None
        self.holds_gradients = False
        if self.window.reduction == "weighted" and GRADIENT_WEIGHT in self.graphs.possible_inputs():
            raise ValueError(
                f"batch.gradient_reduction 'weighted' reserves the argument {GRADIENT_WEIGHT!r} of train_step, but "
                "the model has an input of that name: rename the input"
            )
        traits = {}
        if self.strategy.world_size > 1:
            source.check_joint()
            config.check_joint(self.strategy.zero_stage)
            traits = traits_of(source, config, options, self.graphs)
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
    def has_begun(self) -> bool:
        """Whether there has been a batch, unless the model needs none to begin."""
        return self.graphs.has_started or self.source.fixed

    def started(self) -> Executor:
        """Returns the executor; makes it if there is none yet.

        Raises:
            RuntimeError: As :attr:`executor`.
        """
        if self._executor is None:
            self._executor = self._make_executor()
        executor = self.executor
        assert executor is not None
        return executor

    @property
    def kernels(self) -> str:
        """Whose kernels compute the training step, such as ``ONNX Runtime's``; empty before the first."""
        graphs = [] if self._executor is None else self._executor.graphs_of_variant(True)
        return graphs[0].kernels if graphs else ""

    @property
    def description(self) -> ModelDescription:
        """The model description.

        Raises:
            RuntimeError: Before the first batch, if the description is derived from it.
        """
        return self.graphs.description

    def report(self, title: str) -> Report:
        """Returns what has run, under a title."""
        executor = self._executor
        graphs, runs = (
            ([], {}) if executor is None else ([*executor.graphs(True), *executor.graphs(False)], executor.runs())
        )
        tensors = [*self.source.parameters.values(), *self.source.buffers.values()]
        gradients = [] if executor is None else executor.gradients.tensors.values()
        return Report(
            title,
            tuple(GraphRuns(step.kind, runs[id(step)], step.kernels, step.seconds, step.kept) for step in graphs),
            {},
            0 if self._verifier is None else self._verifier.last,
            memory_of(tensors, gradients),
        )

    @in_transaction
    def export(self, sample_batch: Any = None) -> None:
        """Exports the model before the first step; see ``ORTTrainer.prepare``."""
        batch = self.graphs.bind((self.graphs.blank_batch() if sample_batch is None else sample_batch,), {})
        self.start(Request(batch, True, self.graphs.output_names))

    def bind(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        fetches: Sequence[str] = (),
        training: bool = True,
        backward: bool = True,
    ) -> Call:
        """Binds arguments to inputs, checks them, and looks up or builds the graph for them.

        All that can refuse a batch does so here; nothing has changed then.

        Args:
            args: Arguments by position, as for ``ORTTrainer.train_step``.
            kwargs: Arguments by name.
            fetches: Outputs to return; all if empty.
            training: Whether for a step, or for evaluation, where inputs that ``fetches`` do not need may be left out.
            backward: Whether a step computes gradients.

        Returns:
            The batch with the plan that runs it.

        Raises:
            ExportError: If the model can't be exported.
            IndexError: If an index is out of range.
            TypeError, ValueError: If the batch does not match the description, if losses are to be checked, but the
                loss is not fetched, or if padded places, which are not computed, reach the loss.
        """
        graphs = self.graphs
        batch = graphs.bind(args, kwargs, partly=not training and bool(fetches))
        request, executor = Request(batch, training, graphs.fetches(fetches), backward), self._executor
        if executor is not None and graphs.has_started:
            call = Call(executor, request, graphs.plan(executor, request))
        else:
            call = self.start(request)
        if self.losses is not None and training and backward:
            self.losses.check_fetched(call.request.fetched, call.plan.runner.step.loss)
        if call.plan.indices and self._calls.checks_indices:
            self._calls.check_indices(call)
        if training and backward and self._padding is not None:
            check = functools.partial(self._padding.passes, call.executor, batch=batch)
            if self._calls.run(call, check):
                self._padding = None
        return call

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
            call = self.bind(args, kwargs, self.info.fetches)
            if self.profiler is not None:
                call.plan = self.profiler.plan(call.plan)
            return self._step(transaction, call, weight)

    def step(self, call: Call, weight: float = 1.0, rates: Sequence[float] | None = None) -> Outputs:
        """Runs :meth:`backward` and, at the end of a window, :meth:`end_window`.

        Args:
            call: From :meth:`bind`.
            weight: The weight of the micro-batch in the window's mean.
            rates: Learning rates, one for all parameters or one per group and one for the others; None to take them
                from the schedule or config.

        Returns:
            The outputs that the plan fetches.
        """
        with Transaction(self) as transaction:
            return self._step(transaction, call, weight, rates)

    def _step(
        self,
        transaction: Transaction,
        call: Call,
        weight: float,
        rates: Sequence[float] | None = None,
        updates: bool = True,
    ) -> Outputs:
        executor, window, coming = call.executor, self.window, None
        if updates and self.config.needs_closure:
            if window.size > 1:
                raise RuntimeError(
                    f"{self.config.name} computes the loss several times in an update, but the batches of a window are "
                    "not kept: set gradient_accumulation_steps to 1, or write the loop with forward_backward() and "
                    "optimizer.step(closure)"
                )
            transaction.again = functools.partial(self._again, call)
        transaction.begin(executor, call.plan.runner.step)
        if updates:  # before the run, because both may raise
            if self.config.is_live:
                self.config.check()
            coming = self.rates.upcoming(self.info, self.info.step + 1) if rates is None else rates
        scale = 1.0 if self.precision.scaler is None else self.precision.loss_scale
        if self.optimizer.shows_gradients:
            self._release_shown(executor)
        factor = window.factor(weight, scale)
        check = self._check(call, factor) if self._verifier is not None or self.losses is not None else None
        train = functools.partial(executor.train, batch=call.request.batch, loss_scale=factor, check=check)
        outputs, call.left = self._calls.run(call, train, transaction)
        step = call.plan.runner.step
        if step.buffer_updates:
            self.source.memory.publish(step.buffer_updates)
        is_due = window.add(weight, scale)
        self.info.step += 1
        if self.strategy.world_size > 1:
            transaction.commit()  # no process can roll back alone
        if is_due and coming is not None:
            self._end_window(executor, coming)
        if self.graphs.leaves:
            self.graphs.leave(call.plan.runner.whole, call.left)
        return outputs

    def verify_next(self) -> None:
        """Has the next step compared with PyTorch, if ``debug.verify_every`` is "auto"."""
        if self._verifier is not None:
            self._verifier.expect()

    def _check(self, call: Call, scale: float) -> Check | None:
        """Returns what checks the results of a run before it takes effect; None for nothing.

        Args:
            call: From :meth:`bind`.
            scale: The factor on the loss in the backward pass.
        """
        losses = None if self.losses is None else self.losses.check
        if self._verifier is None:
            return losses
        verify = self._verifier.begin(
            call.executor, call.request.batch, scale, self.info.step + 1, call.plan.runner.step
        )
        if losses is None or verify is None:
            return verify or losses

        def both(*results: Any) -> None:
            verify(*results)
            losses(*results)

        return both

    def backward(self, call: Call, weight: float = 1.0) -> Outputs:
        """Runs the forward and backward pass, adds to the window's gradients and counts the micro-batch.

        Args:
            call: From :meth:`bind`.
            weight: The weight of the micro-batch in the window's mean.

        Returns:
            The outputs that the plan fetches.
        """
        with Transaction(self, joint=False) as transaction:
            return self._step(transaction, call, weight, updates=False)

    def _gradients_of(
        self, call: Call, check: Check | None = None, transaction: Transaction | None = None
    ) -> tuple[Outputs, dict[str, torch.Tensor]]:
        """Runs the forward and backward pass; changes only the random state and buffers.

        Args:
            call: The call.
            check: Called with the results before any change; may raise.
            transaction: In which they run, if there is one.

        Returns:
            The outputs that the plan fetches, and the gradients of the loss by parameter name, as new tensors.
        """
        executor, scale = call.executor, self.precision.loss_scale
        if self.optimizer.shows_gradients:
            self._release_shown(executor)
        work = functools.partial(executor.gradients_of, batch=call.request.batch, loss_scale=scale, check=check)
        (outputs, call.left), gradients = self._calls.run(call, work, transaction)
        if scale != 1.0 and gradients:
            torch._foreach_div_(list(gradients.values()), scale)
        self.source.memory.publish(call.plan.runner.step.buffer_updates)
        return outputs, gradients

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs:
        """Runs the model in training mode; see ``ORTTrainer.forward``."""
        with Transaction(self, joint=False) as transaction:
            call = self.bind(args, kwargs, self.info.fetches, backward=False)
            transaction.begin(call.executor, call.plan.runner.step)
            work = functools.partial(call.executor.forward, batch=call.request.batch)
            outputs, call.left = self._calls.run(call, work, transaction)
            self.source.memory.publish(call.plan.runner.step.buffer_updates)
            self.graphs.leave(call.plan.runner.whole, call.left)
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
            call = self.bind(args, kwargs, self.info.fetches)
            executor, strategy = call.executor, self.strategy
            transaction.begin(executor, call.plan.runner.step)
            check = self._check(call, self.precision.loss_scale)
            outputs, gradients = self._gradients_of(call, check, transaction)
            self.graphs.leave(call.plan.runner.whole, call.left)
            transaction.commit()
            if strategy.world_size > 1:
                meeting = strategy.meet(Arrival("pass", Share(1.0), (), gradients, executor.changed_buffers))
                gradients = strategy.average(meeting)
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
            executor = self.started()
            meeting = self.strategy.meet(Arrival("step", Share(float(bool(gradients))), rates, gradients))
            return meeting.weight > 0 and self._update(executor, meeting, self.optimizer.parts.of(gradients))

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
        executor = self.started()  # takes tensors that the user has replaced since the backward pass
        self.config.check()
        rates = self.rates.upcoming(self.info, self.info.step) if rates is None else rates
        return self._end_window(executor, rates)

    def follow_update(self, meeting: Meeting) -> None:
        """Takes part in an update of the other processes, with the rest of a window or nothing."""
        self.rates.upcoming(self.info, self.info.step)  # advances the schedule
        self._end_window(self._executor or self.started(), meeting=meeting)

    def meet(self, kind: str, rates: Sequence[float] = ()) -> Meeting:
        """Meets the other processes with the window's share, and sets ``step`` to the highest of all processes.

        Args:
            kind: As in :class:`Meeting`.
            rates: The learning rates.
        """
        executor, window, info = self._executor or self.started(), self.window, self.info
        gradients = executor.gradients.present()
        share = window.share() if window.micro_batches else Share(0.0, scale=self.precision.loss_scale)
        meeting = self.strategy.meet(Arrival(kind, share, rates, gradients, executor.changed_buffers, info.step))
        info.step = meeting.step
        return meeting

    def _end_window(self, executor: Executor, rates: Sequence[float] = (), meeting: Meeting | None = None) -> bool:
        """Reduces the gradients of the window over the processes, and updates the weights.

        Args:
            executor: Has the gradients.
            rates: As for :meth:`step`.
            meeting: Where the processes have agreed on the update; None to meet them.

        Returns:
            As :meth:`end_window`.
        """
        if meeting is None:
            meeting = self.meet("update", rates)
        strategy = self.strategy
        if strategy.world_size > 1 and not meeting.weight:
            return False
        gradients, share = strategy.reduce(meeting)
        divisor = self.window.divisor_of(share)
        if gradients is not meeting.own.gradients:
            # With ZeRO no process has the complete sums, so there are no used gradients to show.
            executor.gradients.hold({} if strategy.zero_stage else gradients)
        return self._update(executor, meeting, gradients, divisor, of_window=True)

    def _update(
        self, executor: Executor, meeting: Meeting, gradients: Named, divisor: float = 1.0, of_window: bool = False
    ) -> bool:
        """Updates the weights, counts the update and begins a new window; then the transaction is committed.

        Args:
            executor: Has the parameters.
            meeting: What the processes agreed on.
            gradients: The gradients by parameter name; they are divided and clipped in place.
            divisor: Their divisor.
            of_window: Whether they are those of a window, and not the user's in ``p.grad``.

        Returns:
            As :meth:`end_window`.
        """
        optimizer, info, strategy, transaction = self.optimizer, self.info, self.strategy, self.transaction
        rates = list(map(float, meeting.rates))
        if self.config.is_live:
            self.config.set_rates(meeting.rates)
        checks_finite, norm = self.precision.checks_finite, None
        if gradients and (strategy.zero_stage or not of_window) and not (checks_finite or optimizer.asks_norm):
            # If the user may change the gradients, or they are in parts, the norm is computed now.
            norm = optimizer.parts.total_norm(gradients.values()) / divisor
        run = optimizer.step if self.profiler is None else functools.partial(self.profiler.update, optimizer.step)
        try:
            info.all_finite = run(
                gradients=gradients,
                learning_rates=rates,
                divisor=divisor,
                check_finite=checks_finite,
                again=None if transaction is None else transaction.again,
                number=info.optimization_step,
            )
        finally:  # the gradients were divided in place, even if the update failed
            self.window.reset()
            executor.gradients.reset(of_window)
        if strategy.world_size > 1:
            updated = {name: executor.parameters[name] for name in gradients} if info.all_finite else {}
            strategy.spread(meeting, updated, executor.buffers)
            self.source.memory.publish(executor.buffers)
        norm = optimizer.norm if norm is None else norm
        if self.contents.torch_optimizer is None:
            self.source.memory.publish(executor.parameters)
        else:  # the PyTorch optimizer changed the model itself
            self.graphs.refresh(executor)
        self.holds_gradients = False
        info.note_update(rates, functools.partial(_norm_of_used, executor) if norm is None else norm)
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
            self._executor.gradients.reset()

    def lazy_reset_grad(self) -> None:
        """Drops all gradients that an update would use; see ``ORTTrainer.lazy_reset_grad``."""
        with Transaction(self, joint=False) as transaction:
            transaction.begin()
            self.discard_gradients()
            self.holds_gradients = False
            self.source.memory.drop_gradients()

    def evaluate(self, args: Sequence[Any], kwargs: Mapping[str, Any], fetches: Sequence[str]) -> Outputs:
        """Binds arguments to inputs and runs the model in evaluation mode; changes nothing.

        Args:
            args: Arguments by position, as for ``ORTTrainer.eval_step``.
            kwargs: Arguments by name.
            fetches: Outputs to return; all if empty. Inputs that they do not need may be left out.

        Returns:
            The outputs.
        """
        self.verify_next()
        with Transaction(self, joint=False):
            call = self.bind(args, kwargs, fetches, training=False)
            return self._calls.run(call, functools.partial(call.executor.evaluate, batch=call.request.batch))

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
            cuda_graphs=options.cuda_graphs(self.device),
        )
        update: Callable[..., OptimizerUpdate] = OptimizerUpdate
        if isinstance(config, (TorchOptimizerConfig, FollowedConfig)):
            update = TorchUpdate if isinstance(config, TorchOptimizerConfig) else FollowedUpdate
        self.optimizer = update(
            config,
            trainable,
            {name: config.group_of(*names) for name, names in source.names_of_trainable().items()},
            clip=options.utils.grad_norm_clip,
            max_norm=options.utils.max_grad_norm,
            max_value=options.utils.max_grad_value,
            parts=parts,
            rounds_moments=options.utils.moments == "bfloat16",
        )
        return executor

    def _again(self, call: Call) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Runs a call again; returns the loss and gradients of its batch with the current weights."""
        request = Request(call.request.batch, True, [self.graphs.description.loss.name])
        again = Call(call.executor, request, self.graphs.plan(call.executor, request))
        (loss,), gradients = self._gradients_of(again)
        call.plan, call.left = again.plan, again.left  # what the last run leaves outside is what the step leaves
        return loss, gradients

    def start(self, request: Request) -> Call:
        """Returns the call of a batch; before the first, makes the executor and the first graph.

        They are stored last, so that a failure leaves the loop unchanged.
        """
        executor, graphs, batch = self._executor, self.graphs, request.batch
        if executor is not None and graphs.has_started:
            return Call(executor, request, graphs.plan(executor, request))
        missing = [name for name in graphs.description.input_names if name not in batch]
        if missing:
            raise TypeError(f"inputs {missing} are missing: the first step needs all inputs to export the model")
        executor = executor or self._make_executor()
        if self.options.debug.check_model_export and not self.source.fixed:
            graphs.check_export(executor, batch)
        call = Call(executor, request, graphs.plan(executor, request))
        with uninterrupted():
            self._executor = executor
            graphs.started(executor, batch)
            dtypes = {name: str(value.dtype) for name, value in batch.items()}
            self.strategy.started(dtypes, lambda: self.source.guard.compared)
        return call

    def _release_shown(self, executor: Executor) -> None:
        """Removes the gradients that the last update used from ``p.grad``, if a new window begins."""
        used = executor.gradients.used()
        if used:
            self.optimizer.forget(used)

    def _rebound(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.optimizer.rebind(tensors)

    def _graph_built(self, executor: Executor, step: Step, batch: Batch) -> None:
        """Handles a new graph for a batch; for the first one that trains, writes ``debug.graph_save_paths``."""
        self.precision.name_input(step)
        is_asked = any(self.options.debug.graph_save_paths.to_dict().values())
        if is_asked and step.training and len(executor.graphs(True)) == 1 and not self.strategy.world_rank:
            # The same on all ranks. A graph of PyTorch's operators trains on; the files show it in ONNX.
            step = step if step.in_onnx else self.graphs.portable(executor, training=True, batch=batch)
            accumulate, check_finite = self.window.size > 1, self.precision.checks_finite
            save_graphs(self.options, step, executor, self.optimizer, self.config, accumulate, check_finite)


def _norm_of_used(executor: Executor) -> torch.Tensor | None:
    """Returns the global norm of the gradients that the last update used; None if they are gone."""
    used = executor.gradients.used()
    return global_norm(used.values()) if used else None

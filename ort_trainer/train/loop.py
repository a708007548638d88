"""The step loop: forward and backward pass, accumulation window, loss scale, schedule, update, and their counters.

All interfaces of the trainer translate arguments and run this one loop.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from ..capture.borrow import BORROWED
from ..core.errors import ValueBranchError, VerificationError
from ..core.indices import check_indices
from ..core.interrupts import uninterrupted
from ..core.pages import page
from ..core.report import GraphRuns, Report, memory_of
from ..core.threads import OneThread
from ..engine import Check, Executor, Plan
from ..export.model_source import ModelSource
from ..optim import OptimizerConfig
from ..optim.followed_update import FollowedUpdate
from ..optim.parts import Named, global_norm
from ..optim.step_info import TrainStepInfo
from ..optim.torch_optimizer import FollowedConfig, TorchOptimizerConfig, TorchUpdate
from ..optim.update import Again, OptimizerUpdate
from ..options import ModelDescription, ORTTrainerOptions
from ..profiling import Profile, Profiler
from ..step import Step
from .batch import Batch
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

# Graphs for batches of the same sizes that take different branches of the model.
_MAXIMUM_BRANCHES = 8
_SHOWN_CONDITIONS = 5  # in an error

Outputs = list[torch.Tensor]
Result = TypeVar("Result")


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
        self._checks_indices = options.debug.check_indices
        mask, tolerance = options.utils.remove_padding, 5e-2 if self.precision.mixed else 1e-3
        every = options.verification()
        self._verifier = StepVerifier(every, self.graphs, self.precision.checks_finite, bool(mask)) if every else None
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
        gradients = [] if executor is None else executor.gradients.values()
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
        self.start(batch, True, self.graphs.output_names)

    def bind(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        fetches: Sequence[str] = (),
        training: bool = True,
        backward: bool = True,
    ) -> tuple[Plan, Batch]:
        """Binds arguments to inputs, checks them, and looks up or builds the graph for them.

        All that can refuse a batch does so here; nothing has changed then.

        Args:
            args: Arguments by position, as for ``ORTTrainer.train_step``.
            kwargs: Arguments by name.
            fetches: Outputs to return; all if empty.
            training: Whether for a step, or for evaluation, where inputs that ``fetches`` do not need may be left out.
            backward: Whether a step computes gradients.

        Returns:
            The plan that runs the step, and the batch.

        Raises:
            ExportError: If the model can't be exported.
            IndexError: If an index is out of range.
            TypeError, ValueError: If the batch does not match the description, if losses are to be checked, but the
                loss is not fetched, or if padded places, which are not computed, reach the loss.
        """
        graphs = self.graphs
        batch = graphs.bind(args, kwargs, partly=not training and bool(fetches))
        names = graphs.fetches(fetches)
        if self._executor is not None and graphs.has_started:
            plan = graphs.plan(self._executor, batch, training, names, backward)
        else:
            plan = self.start(batch, training, names, backward)
        if self.losses is not None and training and backward:
            self.losses.check_fetched(names, plan.runner.step.loss)
        if plan.indices and self._checks_indices:
            self._check_indices(plan, batch)
        if self._padding is not None and training and backward:
            executor, padding = self._executor, self._padding
            assert executor is not None
            plan, passes = self._on_its_branch(lambda plan: padding.passes(executor, plan, batch), plan, batch)
            if passes:
                self._padding = None
        return plan, batch

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
            plan, batch = self.bind(args, kwargs, self.info.fetches)
            if self.profiler is not None:
                plan = self.profiler.plan(plan)
            return self._step(transaction, plan, batch, weight)

    def step(self, plan: Plan, batch: Batch, weight: float = 1.0, rates: Sequence[float] | None = None) -> Outputs:
        """Runs :meth:`backward` and, at the end of a window, :meth:`end_window`.

        Args:
            plan, batch: From :meth:`bind`.
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
        updates: bool = True,
    ) -> Outputs:
        executor, window, again, coming = self._executor, self.window, None, None
        assert executor is not None
        if updates and self.config.needs_closure:
            if window.size > 1:
                raise RuntimeError(
                    f"{self.config.name} computes the loss several times in an update, but the batches of a window are "
                    "not kept: set gradient_accumulation_steps to 1, or write the loop with forward_backward() and "
                    "optimizer.step(closure)"
                )
            again = functools.partial(self._again, batch)
        transaction.begin(executor, plan.runner.step)
        if updates:  # before the run, because both may raise
            if self.config.is_live:
                self.config.check()
            coming = self.rates.upcoming(self.info, self.info.step + 1) if rates is None else rates
        scale = 1.0 if self.precision.scaler is None else self.precision.loss_scale
        if self.optimizer.shows_gradients:
            self._release_shown(executor)
        factor = window.factor(weight, scale)
        check = self._check(plan, batch, factor) if self._verifier is not None or self.losses is not None else None
        plan, outputs = self._on_its_branch(
            lambda plan: executor.train(plan, batch, loss_scale=factor, check=check), plan, batch, transaction
        )
        if plan.runner.step.buffer_updates:
            self.source.memory.publish(plan.runner.step.buffer_updates)
        is_due = window.add(weight, scale)
        self.info.step += 1
        if self.strategy.world_size > 1:
            transaction.commit()  # no process can roll back alone
        if is_due and coming is not None:
            self._end_window(coming, again, transaction)
        if self.graphs.leaves:
            self._leave(executor)
        transaction.commit()
        return outputs

    def _leave(self, executor: Executor) -> None:
        """Leaves outside what the last run has left there."""
        if executor.left is not None:
            self.graphs.leave(*executor.left)
            executor.left = None

    def verify_next(self) -> None:
        """Has the next step compared with PyTorch, if ``debug.verify_every`` is "auto"."""
        if self._verifier is not None:
            self._verifier.expect()

    def _check(self, plan: Plan, batch: Batch, scale: float) -> Check | None:
        """Returns what checks the results of a run before it takes effect; None for nothing.

        Args:
            plan, batch: From :meth:`bind`.
            scale: The factor on the loss in the backward pass.
        """
        losses = None if self.losses is None else self.losses.check
        if self._verifier is None:
            return losses
        assert self._executor is not None
        verify = self._verifier.begin(self._executor, batch, scale, self.info.step + 1, plan.runner.step)
        if losses is None or verify is None:
            return verify or losses

        def both(*results: Any) -> None:
            verify(*results)
            losses(*results)

        return both

    def backward(self, plan: Plan, batch: Batch, weight: float = 1.0) -> Outputs:
        """Runs the forward and backward pass, adds to the window's gradients and counts the micro-batch.

        Args:
            plan, batch: From :meth:`bind`.
            weight: The weight of the micro-batch in the window's mean.

        Returns:
            The outputs that the plan fetches.
        """
        with Transaction(self, joint=False) as transaction:
            return self._step(transaction, plan, batch, weight, updates=False)

    def _check_indices(self, plan: Plan, batch: Batch) -> None:
        """Raises an IndexError if a value of the batch that the plan uses as an index is out of range."""
        indices = plan.indices
        if self.device.type != "cpu":  # to read values there would wait for the device, whose kernels check them
            indices = tuple(entry for entry in indices if entry[0].input in batch.on_host)
        check_indices(indices, batch.array, plan.sizes, batch.extremes)

    def _on_its_branch(
        self,
        run: Callable[[Plan], Result],
        plan: Plan,
        batch: Batch,
        transaction: Transaction | None = None,
        training: bool = True,
        backward: bool = True,
    ) -> tuple[Plan, Result]:
        """Runs a plan, or one for the same batch whose graph has the branches that the batch takes in the model.

        Args:
            run: Runs it; a :class:`ValueBranchError` of it has changed nothing.
            plan, batch: From :meth:`bind`.
            transaction: Has begun for the plan; None if there is none.
            training: Whether in training mode.
            backward: Whether a run in training mode computes gradients.

        Returns:
            The plan that ran, and what it returned.

        Raises:
            ValueBranchError: If there are too many such graphs, or the branches differ from those of PyTorch's run.
            IndexError: If ONNX Runtime fails at an index out of range, which was not checked before.
            Exception: What the model raises for this batch.
        """
        executor, is_new, refused = self._executor, False, []
        assert executor is not None
        while True:
            try:
                return plan, run(plan)
            except ValueBranchError as error:
                refused.append(plan.runner.whole)
                if is_new and error.__cause__ is not None:  # PyTorch takes the branches of this graph
                    raise error.__cause__ from None
                if is_new or len(refused) == _MAXIMUM_BRANCHES:
                    raise ValueBranchError(f"{error}\n{_why_no_other_graph(refused, is_new)}") from None
            except VerificationError as error:
                if self._verifier is None or not self._verifier.renews(error):
                    raise
            except RuntimeError as error:
                if plan.runner.step.programs is None and not self._checks_indices:
                    # ONNX Runtime names neither the input nor, for some operators, the value.
                    try:
                        self._check_indices(plan, batch)
                    except IndexError as found:
                        advice = "with debug.check_indices True, such a value is found before the run"
                        raise IndexError(f"{found}. Nothing has changed; {advice}") from error
                raise
            if transaction is not None:
                transaction.undo()
            unfetched = {*plan.runner.step.assumptions, *plan.runner.step.left}
            names = [output.name for output in plan.outputs if output.name not in unfetched]
            count = len(executor.graphs(training))
            plan = self.graphs.plan(executor, batch, training, names, backward, refused)
            is_new = len(executor.graphs(training)) > count
            if transaction is not None:
                transaction.begin(executor, plan.runner.step)

    def gradients_of(
        self, plan: Plan, batch: Batch, check: Check | None = None, transaction: Transaction | None = None
    ) -> tuple[Outputs, dict[str, torch.Tensor]]:
        """Runs the forward and backward pass; changes only the random state and buffers.

        Args:
            plan, batch: From :meth:`bind`.
            check: Called with the results before any change; may raise.
            transaction: In which they run, if there is one.

        Returns:
            The outputs that the plan fetches, and the gradients of the loss by parameter name, as new tensors.
        """
        assert self._executor is not None
        scale = self.precision.loss_scale
        if self.optimizer.shows_gradients:
            self._release_shown(self._executor)
        executor = self._executor
        plan, (outputs, gradients) = self._on_its_branch(
            lambda plan: executor.gradients_of(plan, batch, loss_scale=scale, check=check), plan, batch, transaction
        )
        if scale != 1.0 and gradients:
            torch._foreach_div_(list(gradients.values()), scale)
        self.source.memory.publish(plan.runner.step.buffer_updates)
        return outputs, gradients

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outputs:
        """Runs the model in training mode; see ``ORTTrainer.forward``."""
        with Transaction(self, joint=False) as transaction:
            plan, batch = self.bind(args, kwargs, self.info.fetches, backward=False)
            executor = self._executor
            assert executor is not None
            transaction.begin(executor, plan.runner.step)
            plan, outputs = self._on_its_branch(
                lambda plan: executor.forward(plan, batch), plan, batch, transaction, backward=False
            )
            self.source.memory.publish(plan.runner.step.buffer_updates)
            self._leave(executor)
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
            plan, batch = self.bind(args, kwargs, self.info.fetches)
            executor, strategy = self._executor, self.strategy
            assert executor is not None
            transaction.begin(executor, plan.runner.step)
            check = self._check(plan, batch, self.precision.loss_scale)
            outputs, gradients = self.gradients_of(plan, batch, check, transaction)
            self._leave(executor)
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
            self.started()
            meeting = self.strategy.meet(Arrival("step", Share(float(bool(gradients))), rates, gradients))
            return meeting.weight > 0 and self._update(meeting, self.optimizer.parts.of(gradients))

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
        self.started()  # takes tensors that the user has replaced since the backward pass
        self.config.check()
        rates = self.rates.upcoming(self.info, self.info.step) if rates is None else rates
        return self._end_window(rates)

    def follow_update(self, meeting: Meeting) -> None:
        """Takes part in an update of the other processes, with the rest of a window or nothing."""
        self.rates.upcoming(self.info, self.info.step)  # advances the schedule
        self._end_window(meeting=meeting)

    def meet(self, kind: str, rates: Sequence[float] = ()) -> Meeting:
        """Meets the other processes with the window's share, and sets ``step`` to the highest of all processes.

        Args:
            kind: As in :class:`Meeting`.
            rates: The learning rates.
        """
        executor, window, info = self._executor or self.started(), self.window, self.info
        gradients = executor.present_gradients()
        share = window.share() if window.micro_batches else Share(0.0, scale=self.precision.loss_scale)
        meeting = self.strategy.meet(Arrival(kind, share, rates, gradients, executor.changed_buffers, info.step))
        info.step = meeting.step
        return meeting

    def _end_window(
        self,
        rates: Sequence[float] = (),
        again: Again | None = None,
        transaction: Transaction | None = None,
        meeting: Meeting | None = None,
    ) -> bool:
        """Reduces the gradients of the window over the processes, and updates the weights.

        Args:
            rates: As for :meth:`step`.
            again: Recomputes the loss and gradients.
            transaction: The step's, which is committed when the weights have changed.
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
            assert self._executor is not None
            # With ZeRO no process has the complete sums, so there are no used gradients to show.
            self._executor.hold_gradients({} if strategy.zero_stage else gradients)
        return self._update(meeting, gradients, divisor, True, again, transaction)

    def _update(
        self,
        meeting: Meeting,
        gradients: Named,
        divisor: float = 1.0,
        of_window: bool = False,
        again: Again | None = None,
        transaction: Transaction | None = None,
    ) -> bool:
        """Updates the weights, counts the update and begins a new window.

        Args:
            meeting: What the processes agreed on.
            gradients: The gradients by parameter name; they are divided and clipped in place.
            divisor: Their divisor.
            of_window: Whether they are those of a window, and not the user's in ``p.grad``.
            again, transaction: As for :meth:`_end_window`.

        Returns:
            As :meth:`end_window`.
        """
        executor, optimizer, info, strategy = self._executor, self.optimizer, self.info, self.strategy
        assert executor is not None
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
                again=again,
                number=info.optimization_step,
            )
        finally:  # the gradients were divided in place, even if the update failed
            self.window.reset()
            executor.lazy_reset_grad(of_window)
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
            self._executor.lazy_reset_grad()

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
            plan, batch = self.bind(args, kwargs, fetches, training=False)
            executor = self._executor
            assert executor is not None
            run = functools.partial(executor.evaluate, batch=batch)
            return self._on_its_branch(run, plan, batch, training=False)[1]

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

    def _again(self, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns the loss and gradients of a batch with the current weights."""
        assert self._executor is not None
        plan = self.graphs.plan(self._executor, batch, True, [self.graphs.description.loss.name])
        (loss,), gradients = self.gradients_of(plan, batch)
        return loss, gradients

    def start(self, batch: Batch, training: bool, names: Sequence[str], backward: bool = True) -> Plan:
        """Makes the executor and the first graph; stores them last, so that a failure leaves the loop unchanged."""
        if self._executor is not None and self.graphs.has_started:
            return self.graphs.plan(self._executor, batch, training, names, backward)
        missing = [name for name in self.graphs.description.input_names if name not in batch]
        if missing:
            raise TypeError(f"inputs {missing} are missing: the first step needs all inputs to export the model")
        executor = self._executor or self._make_executor()
        if self.options.debug.check_model_export and not self.source.fixed:
            self.graphs.check_export(executor, batch)
        plan = self.graphs.plan(executor, batch, training, names, backward)
        with uninterrupted():
            self._executor = executor
            self.graphs.started(executor, batch)
            dtypes = {name: str(value.dtype) for name, value in batch.items()}
            self.strategy.started(dtypes, self.source.compared)
        return plan

    def _release_shown(self, executor: Executor) -> None:
        """Removes the gradients that the last update used from ``p.grad``, if a new window begins."""
        used = executor.used_gradients()
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
            step = step if step.programs is None else self.graphs.portable(executor, training=True, batch=batch)
            accumulate, check_finite = self.window.size > 1, self.precision.checks_finite
            save_graphs(self.options, step, executor, self.optimizer, self.config, accumulate, check_finite)


def _norm_of_used(executor: Executor) -> torch.Tensor | None:
    """Returns the global norm of the gradients that the last update used; None if they are gone."""
    used = executor.used_gradients()
    return global_norm(used.values()) if used else None


def _why_no_other_graph(refused: Sequence[Step], is_new: bool) -> str:
    """Returns why a batch gets no graph with its branches, and what to do.

    Args:
        refused: The graphs whose branches it does not take.
        is_new: Whether the last one was exported for this batch.
    """
    if is_new:
        return (
            "The graph was exported for this batch, for which PyTorch takes that branch, so the condition depends on "
            "random numbers, such as those of dropout, or on rounding: compute both branches, and choose with "
            "torch.where"
        )
    lines = dict.fromkeys(line for step in refused for _, line in step.assumptions.values())
    shown = "\n  ".join(list(lines)[:_SHOWN_CONDITIONS])
    more = f"\n  and {len(lines) - _SHOWN_CONDITIONS} more" if len(lines) > _SHOWN_CONDITIONS else ""
    return (
        f"There are {len(refused)} graphs already for batches of these sizes, at most one for each of "
        f"{_MAXIMUM_BRANCHES} combinations of branches. These conditions differ from batch to batch, or may:\n"
        f"  {shown}{more}\n"
        "Compute both branches and choose with torch.where; as a size, take x.item() instead of int(x); decide before "
        "the step, and pass the result as an input; or train with ORTModule, which runs such batches in PyTorch "
        f"({page('models.md#branches-on-values')})"
    )

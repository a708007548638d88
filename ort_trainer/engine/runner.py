"""Runs a step: the common interface, and the runner on ONNX Runtime, in NumPy's or PyTorch's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..core.dims import evaluate
from ..core.errors import ValueBranchError
from ..core.indices import IndexRange
from ..step import Dim, RandomInput, Step, dtype_name
from .ort import make_session

if TYPE_CHECKING:
    from .ort import InferenceSession, OrtValue, RunOptions, SessionOptions

Check = Callable[[Step, Mapping[str, Any], Mapping[str, Any]], None]
"""Receives the step of a run, the fetched outputs by name, and the others; raises to discard the run."""


Wanted = Sequence[tuple[RandomInput, tuple[int, ...]]]
"""Random inputs with their shapes."""
Kind = tuple[Sequence[int] | None, Any]
"""The shape of a tensor, None if only ONNX Runtime can determine it, and its dtype."""


class Output(NamedTuple):
    """An output to fetch.

    Attributes:
        name: Its name.
        shape: Its sizes; None if only ONNX Runtime can determine them.
        bound: The dtype in which ONNX Runtime writes it.
        dtype: The dtype in which it is returned.
    """

    name: str
    shape: Sequence[int] | None
    bound: Any
    dtype: Any


class Memory(Protocol):
    """The tensors of one library, which ONNX Runtime reads and writes in place."""

    def dtypes(self, name: str) -> tuple[Any, Any]:
        """Returns the dtypes in which an output of a described dtype is written and returned."""

    def bind_input(self, binding: Any, name: str, value: Any) -> Any:
        """Binds a contiguous tensor, and returns the tensor that must live as long as the binding."""

    def bind_output(self, binding: Any, name: str, value: Any) -> None:
        """Binds a tensor that a run writes."""

    def bind_new(self, binding: Any, output: Output) -> Any:
        """Binds and returns a new tensor for an output; None if ONNX Runtime allocates it."""

    def received(self, value: OrtValue) -> Any:
        """Returns a tensor that ONNX Runtime has allocated."""

    def draw(self, wanted: Wanted, generator: Any) -> list[Any]:
        """Returns new random numbers."""


@dataclass
class Binding:
    """Tensors that are bound once: the state and a set of destinations, and the loss scale until it changes.

    Attributes:
        binding: ONNX Runtime's own binding.
        destinations: Graph output -> the tensor that it is written to, which must live as long as the binding.
        loss_scale: The tensor that is bound as the loss scale.
    """

    binding: Any
    destinations: Mapping[str, Any]
    loss_scale: Any = None


@dataclass(frozen=True)
class Plan:
    """Everything that a run needs for batches of one shape and one choice of outputs; computed once, used in each step.

    Attributes:
        runner: The runner of the graph.
        outputs: The outputs to fetch, and the conditions that a run must check.
        random: The random inputs with their shapes.
        indices: The index ranges, with their sizes, of inputs that the fetched outputs depend on.
        sizes: The sizes of the symbolic dimensions.
        bindings: What is valid as long as the state stays where it is: key of a set of destinations -> its binding.
        results: Names of all results that a run computes.
        function: Computes these results; only for graphs of programs.
    """

    runner: GraphRunner
    outputs: tuple[Output, ...]
    random: Wanted
    indices: tuple[tuple[IndexRange, int], ...]
    sizes: Mapping[str, int]
    bindings: dict[Any, Any] = field(default_factory=dict)
    results: tuple[str, ...] = ()
    function: Callable[..., Any] | None = None


class Stage(NamedTuple):
    """A part of a graph, to be run by itself.

    Attributes:
        run: A function of a list of tensors, which it empties.
        inputs: Names of the values that it takes.
        outputs: Names of the values that it returns.
        last: Names of the values that no later stage takes, and that are not outputs of the graph.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    inputs: list[str]
    outputs: list[str]
    last: list[str]


class GraphRunner(ABC):
    """Runs a step.

    Args:
        step: The step.
        state: The tensors for ``step.state``; they must not move in memory.
        memory: The memory of all tensors.

    Attributes:
        keeps_destinations: Whether runs write into bound destinations; otherwise destinations are optional.
        names_indices: Whether the error of a run names an index that is out of range.
        stages: The graph's parts in order, for runs whose first results are used while the rest still runs; empty if
            it runs only as a whole.
        inputs: Names of the graph's inputs: state, batch, random numbers, loss scale.
        outputs: Names of the graph's outputs.
        whole: The step itself, or the unpruned step of which it is a part.
        runs: How often it has run in a trainer.
    """

    keeps_destinations: bool
    names_indices: bool

    def __init__(self, step: Step, state: Mapping[str, Any], memory: Memory) -> None:
        self.step = step
        self._memory = memory
        self._draw = memory.draw
        self._state = {step.state[name]: value for name, value in state.items()}
        self.inputs = [*step.state.values(), *(spec.name for spec in step.inputs)]
        self.inputs += [spec.name for spec in step.random]
        self.inputs += [step.loss_scale.name] if step.loss_scale is not None else []
        self.outputs = [spec.name for spec in (*step.outputs, *step.saved)]
        for part in (step.gradients, step.input_gradients, step.buffer_updates, step.input_updates):
            self.outputs += part.values()
        self.outputs += step.assumptions
        self.whole = step
        self.runs = 0

    @property
    def stages(self) -> Sequence[Stage]:
        """The graph's parts; see the class."""
        return ()

    def session(self) -> InferenceSession:
        """Returns the ONNX Runtime session that runs the graph.

        Raises:
            RuntimeError: If the graph runs on PyTorch's kernels.
        """
        raise RuntimeError(
            "training runs on PyTorch's kernels, so it has no ONNX Runtime session: set utils.kernels to "
            "'onnxruntime' to train in one"
        )

    def draw(self, wanted: Wanted) -> list[Any]:
        """Returns random inputs for :meth:`call`, from the default generator."""
        return self._memory.draw(wanted, None)

    def rebind(self, name: str, tensor: Any) -> None:
        """Replaces the tensor of a parameter or buffer; the caller must clear the bindings of all plans."""
        self._state[self.step.state[name]] = tensor

    def plan(self, shapes: Mapping[str, tuple[int, ...]], names: Sequence[str]) -> Plan:
        """Returns a plan for inputs of these shapes that fetches the named outputs."""
        sizes = self.step.sizes(shapes)
        specs = {spec.name: spec for spec in self.step.outputs}
        return Plan(
            self,
            tuple(
                Output(name, evaluated(specs[name].shape, sizes), *self._memory.dtypes(specs[name].dtype))
                for name in dict.fromkeys(names)
            )
            + tuple(Output(name, (), *self._memory.dtypes("bool")) for name in self.step.assumptions),
            tuple((spec, evaluated(spec.shape, sizes) or ()) for spec in self.step.random),
            tuple(
                (entry, evaluate(entry.size, sizes))
                for entry in self.step.index_ranges
                if self.step.training or not entry.outputs or not set(names).isdisjoint(entry.outputs)
            ),
            sizes,
        )

    def overwritten(self, plan: Plan) -> Sequence[Any]:
        """Returns the results of a plan's last run that its next one overwrites, besides bound destinations."""
        return ()

    @abstractmethod
    def call(self, values: list[Any], results: Callable[[], Sequence[Kind]]) -> Sequence[Any]:
        """Runs the graph on all its inputs, including the state, without a plan.

        Args:
            values: The values of :attr:`inputs`. The list is emptied, to free them early.
            results: Returns the kinds of :attr:`outputs`; called if the runner needs to know them.

        Returns:
            The values of :attr:`outputs`, in new tensors.
        """

    @abstractmethod
    def run(
        self,
        plan: Plan,
        batch: Mapping[str, Any],
        *,
        destination_key: Any = "",
        destinations: Mapping[str, Any] | None = None,
        loss_scale: Any = None,
        generator: Any = None,
        options: RunOptions | None = None,
    ) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Runs the graph once.

        Args:
            plan: From :meth:`plan`, for the shapes of the batch.
            batch: Contiguous tensors by input name.
            destination_key: Identifies a set of destinations, which is bound once per plan.
            destinations: Graph output -> the tensor that it is written to, for gradients and updated buffers; required
                if the plan has no binding for the key yet.
            loss_scale: Value of the loss scale input.
            generator: Draws the random inputs.
            options: ONNX Runtime's options for this run.

        Returns:
            The fetched outputs by name, in new tensors; and tensors with other outputs: the destinations, or
            equivalents.
        """


class SessionRunner(GraphRunner):
    """Runs a step in an ONNX Runtime session.

    Args:
        step: The step.
        state: The tensors for ``step.state``; they must not move in memory.
        memory: The memory of all tensors.
        options: Options of the session.
        providers: Execution providers of the session with their options.
        session: An existing session for the step; None to create one.
    """

    keeps_destinations = True
    names_indices = False

    def __init__(
        self,
        step: Step,
        state: Mapping[str, Any],
        memory: Memory,
        options: SessionOptions | None = None,
        providers: Sequence[tuple[str, dict[str, object]]] = (),
        session: InferenceSession | None = None,
    ) -> None:
        super().__init__(step, state, memory)
        self._settings = (options, providers)
        self.inference_session = self._load() if session is None else session

    def session(self) -> InferenceSession:
        """Returns the session; see the base class."""
        return self.inference_session

    def _load(self) -> InferenceSession:
        options, providers = self._settings
        assert options is not None
        return make_session(self.step.serialized(), options, providers)

    def run(
        self,
        plan: Plan,
        batch: Mapping[str, Any],
        *,
        destination_key: Any = "",
        destinations: Mapping[str, Any] | None = None,
        loss_scale: Any = None,
        generator: Any = None,
        options: RunOptions | None = None,
    ) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Runs the graph once; see the base class."""
        bound = plan.bindings.get(destination_key) or self.bind(plan, destination_key, self._state, destinations or {})
        binding, memory = bound.binding, self._memory
        # Keeps the tensors alive during the run: a binding only holds their addresses.
        alive = [memory.bind_input(binding, name, value) for name, value in batch.items()]
        if self.step.loss_scale is not None and loss_scale is not None and loss_scale is not bound.loss_scale:
            bound.loss_scale = memory.bind_input(binding, self.step.loss_scale.name, loss_scale)
        drawn = self._draw(with_probabilities(plan.random, self._state), generator) if plan.random else []
        for (spec, _), value in zip(plan.random, drawn, strict=True):
            alive.append(memory.bind_input(binding, spec.name, value))
        results = {output.name: memory.bind_new(binding, output) for output in plan.outputs}
        self._launch(binding, options)
        if any(value is None for value in results.values()):
            # get_outputs() returns them in the order of their first binding.
            ort_values = dict(zip([*bound.destinations, *results], binding.get_outputs(), strict=True))
            results |= {name: memory.received(ort_values[name]) for name, value in results.items() if value is None}
        for output in plan.outputs:
            if output.bound is not output.dtype:
                results[output.name] = results[output.name].to(output.dtype)
        return results, bound.destinations

    def call(self, values: list[Any], results: Callable[[], Sequence[Kind]]) -> Sequence[Any]:
        """Runs the graph on all its inputs; see the base class."""
        binding, memory = self.inference_session.io_binding(), self._memory
        alive = [memory.bind_input(binding, name, value) for name, value in zip(self.inputs, values, strict=True)]
        kinds = zip(self.outputs, results(), strict=True)
        wanted = [Output(name, shape, *memory.dtypes(dtype_name(dtype))) for name, (shape, dtype) in kinds]
        outputs = [memory.bind_new(binding, output) for output in wanted]
        self._launch(binding, None)
        if any(value is None for value in outputs):
            allocated = binding.get_outputs()
            outputs = [
                memory.received(ort_value) if value is None else value
                for value, ort_value in zip(outputs, allocated, strict=True)
            ]
        alive.clear()
        values.clear()
        return [
            value.to(output.dtype) if output.bound is not output.dtype else value
            for value, output in zip(outputs, wanted, strict=True)
        ]

    def bind(self, plan: Plan, key: Any, inputs: Mapping[str, Any], destinations: Mapping[str, Any]) -> Binding:
        """Binds tensors for all runs of a plan with a key: graph inputs that it reads, and outputs that it writes."""
        binding = self.inference_session.io_binding()
        for name, value in inputs.items():
            self._memory.bind_input(binding, name, value)
        for name, value in destinations.items():
            self._memory.bind_output(binding, name, value)
        bound = plan.bindings[key] = Binding(binding, destinations)
        return bound

    def _launch(self, binding: Any, options: RunOptions | None) -> None:
        """Runs the bound inputs and outputs on ONNX Runtime."""
        try:
            if options is None:
                self.inference_session.run_with_iobinding(binding)
            else:
                self.inference_session.run_with_iobinding(binding, options)
        except RuntimeError as error:
            raise RuntimeError(
                f"ONNX Runtime can't run this batch: {error}. The node's name begins with PyTorch's operator; often, "
                "an index or a size that the model computes is out of range. The model in PyTorch shows the line"
            ) from error


def check_branches(step: Step, results: dict[str, Any]) -> None:
    """Checks that a run has taken the branches of the model that its batch takes in PyTorch.

    Args:
        step: What ran.
        results: Its results by name; conditions are removed.

    Raises:
        ValueBranchError: If the batch takes another branch, so that no result is valid.
    """
    for name, (value, line) in step.assumptions.items():
        if bool(results.pop(name)) != value:  # only the first: in PyTorch, the model may never reach the later ones
            raise ValueBranchError(
                f"this batch takes another branch of the model than the one in its graph: the condition is {not value} "
                f"and the graph assumes {value}, as in the batch that it was exported for. {line}"
            )


def check_failure(step: Step, error: Exception) -> None:
    """Takes an error of a kernel, such as an index out of range, as the sign of a batch that takes another branch.

    Args:
        step: What ran.
        error: The error.

    Raises:
        ValueBranchError: If the graph assumes a branch; the error of the kernel is its cause.
    """
    if step.assumptions:
        raise ValueBranchError(
            f"this batch takes another branch of the model than the one in its graph, where a kernel fails: {error}"
        ) from error


def with_probabilities(wanted: Wanted, state: Mapping[str, Any]) -> Wanted:
    """Returns random inputs with the probabilities of a run in their parameters.

    Args:
        wanted: The random inputs with their shapes.
        state: Graph input -> its value, for those that are probabilities.
    """
    return [
        (_with_probability(spec, float(state[spec.probability])) if spec.probability else spec, shape)
        for spec, shape in wanted
    ]


def _with_probability(spec: RandomInput, kept: float) -> RandomInput:
    # Dropout scales the elements that it keeps by 1 / P(kept); the factor is the second parameter of "bernoulli".
    rest = (1.0 / kept,) if spec.kind == "bernoulli" else spec.parameters[1:]
    return spec._replace(parameters=(kept, *rest))


def evaluated(shape: Sequence[Dim] | None, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """Returns a shape as numbers, for sizes of the symbolic dimensions; None for an unknown shape."""
    return None if shape is None else tuple(evaluate(size, sizes) for size in shape)

"""Trains a small model with an untested version of torch, and compares it with eager PyTorch.

A part of torch that changed need not raise an error: with torch 2.14, the gradient of custom functions was wrong. The
model has what is easily lost on the way from a model to a graph. The cache of exports records a check that passed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ..capture import torch_versions
from ..capture.isolation import can_differentiate, can_isolate, run_in_child
from ..capture.step_module import ExportedStep
from ..core.errors import ExportError, warn
from ..engine import Executor, Request
from ..options import ModelDescription
from ..step.cache import SOURCES_AT_IMPORT, ExportCache
from .export import export

_STEPS, _RATE = 3, 0.1
_TOLERANCE = 1e-4
_passed: set[str] = set()  # whose kernels were checked in this process


def check_torch(kernels: str, cache: ExportCache | None) -> None:
    """Checks an untested version of torch once; warns that it is untested.

    Args:
        kernels: Whose kernels are to run the training step, as in :class:`ExportedStep`.
        cache: Records checks that passed. One that failed is repeated by the next process.

    Raises:
        ExportError: If the small model can't be trained, or trains otherwise than in eager PyTorch.
    """
    if torch_versions.is_tested() or kernels in _passed:
        return
    key = f"torch-{torch.__version__}-{kernels}-{SOURCES_AT_IMPORT[:16]}"
    if cache is None or cache.load(key)[0] is None:

        def in_child() -> bytes | None:
            return _fault(kernels).encode() if can_differentiate() else None

        # As the export itself, so that this process does not import what only exports need.
        answer = run_in_child(in_child) if can_isolate() else None
        fault = _fault(kernels) if answer is None else answer.decode()
        if fault:
            raise ExportError(fault)
        if cache is not None:
            cache.store(key, b"passed")
    warn(
        f"torch {torch.__version__} has not been tested with this version of ort_trainer, which was tested with "
        f"{', '.join(torch_versions.TESTED)}. A small model trained correctly with it"
    )
    _passed.add(kernels)


def _fault(kernels: str) -> str:
    """Returns what is wrong with training the small model; "" if nothing."""
    for custom in (False, True):
        for kind in dict.fromkeys((kernels, "onnxruntime")):
            try:
                difference = _difference(custom, kind)
            except Exception as error:
                return f"{_advice('can not train with it')}\n  {error}"
            if not difference <= _TOLERANCE:  # NaN as well
                return (
                    f"{_advice('trains wrongly with it')}\n  {'with' if custom else 'without'} a custom "
                    f"autograd.Function, after {_STEPS} steps the values differ by {difference:.1g} from those of "
                    "eager PyTorch"
                )
    return ""


def _advice(what: str) -> str:
    tested = torch_versions.TESTED
    return (
        f"torch {torch.__version__} has not been tested with this version of ort_trainer, which {what}: install a "
        f"newer ort_trainer, or a tested torch ({', '.join(tested)}): pip install 'torch=={tested[-1]}.*'"
    )


class _Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 3


class _Model(nn.Module):
    """Has tied weights, dropout, batch norm, a buffer that changes, ``detach``, and perhaps a custom function."""

    steps: torch.Tensor

    def __init__(self, custom: bool) -> None:
        super().__init__()
        self.custom = custom
        self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.layer, self.norm, self.dropout = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.25)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, token: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        hidden = self.norm(self.layer(self.embedding(token)))
        hidden = hidden + (hidden * hidden).detach() / self.steps
        if self.custom:
            hidden = _Tripled.apply(hidden)  # type: ignore[no-untyped-call]
        logits: torch.Tensor = self.head(self.dropout(torch.tanh(hidden)))
        return logits


def _difference(custom: bool, kernels: str) -> float:
    """Returns by how much losses, weights and buffers differ from eager PyTorch's at most."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        theirs = _Model(custom)
        ours = copy.deepcopy(theirs)
        batches = [{"token": torch.randint(9, (size,)), "label": torch.randint(9, (size,))} for size in (6, 4, 5)]
        state = torch.get_rng_state()
        expected = _trained_by_pytorch(theirs, batches)
        torch.set_rng_state(state)
        losses = _trained_here(ours, batches, kernels)
    pairs = [*zip([*losses, *ours.state_dict().values()], [*expected, *theirs.state_dict().values()], strict=True)]
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


_loss_of = nn.functional.cross_entropy


def _trained_by_pytorch(model: nn.Module, batches: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = _loss_of(model(batch["token"]), batch["label"])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss)
    return losses


def _trained_here(model: nn.Module, batches: list[dict[str, torch.Tensor]], kernels: str) -> list[torch.Tensor]:
    parameters = dict(model.named_parameters())
    inputs = [("token", ["batch"]), ("label", ["batch"])]
    description = ModelDescription({"inputs": inputs, "outputs": [("loss", [], True)]})
    step = ExportedStep(model, description, _loss_of, frozenset(parameters), labels=("label",), kernels=kernels)
    exported = export(step, batches[0], True, None, lambda stage: None)
    executor = Executor(parameters, dict(model.named_buffers()), seed=None)
    executor.add_graph(exported.step)
    losses = []
    for batch in batches:
        plan = executor.plan(Request(batch, True, ["loss"]))
        if plan is None:
            raise ExportError(f"the graph does not accept a batch of {len(batch['token'])}")
        executor.gradients.reset()
        losses += executor.train(plan, batch).outputs
        with torch.no_grad():
            for name, gradient in executor.gradients.present().items():
                parameters[name].sub_(gradient, alpha=_RATE)
    return losses

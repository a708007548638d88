"""The class: an ``ORTModule`` is its module for all that is not a call."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from ort_trainer import ORTModule

from .pairs import Heads, close

X = torch.ones(4, 6)


def test_names_are_the_modules() -> None:
    module = Heads()
    ours = ORTModule(module)
    assert isinstance(ours, nn.Module) and ours.module is module
    assert list(ours.state_dict()) == list(module.state_dict())
    assert dict(ours.named_parameters()) == dict(module.named_parameters())
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in module.named_modules()]
    assert ours.trunk is module.trunk and list(ours.children()) == list(module.children())
    assert inspect.signature(ours.forward) == inspect.signature(module.forward)
    assert repr(ours) == f"ORTModule({module!r})" and "trunk" in dir(ours)


def test_changes_reach_the_module() -> None:
    module = Heads()
    ours = ORTModule(module)
    ours.eval()
    assert not module.training and not module.norm.training
    assert ours.train() is ours and module.training and ours.training
    ours.training = False
    assert not module.training
    ours.note, ours.extra = "kept", nn.Linear(2, 2)
    assert module.note == "kept" and module.extra is ours.extra and "extra.weight" in module.state_dict()
    del ours.note, ours.extra
    assert not hasattr(module, "note") and not hasattr(ours, "extra")
    assert ours.to(torch.float64) is ours and module.trunk.weight.dtype == torch.float64
    ours.apply(lambda part: part.register_buffer("mark", torch.ones(1)) if part is module else None)
    assert "mark" in module.state_dict()
    ours.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in module.parameters())


def test_state_dicts() -> None:
    class Extra(Heads):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None:
            self.loaded = state

    ours, other = ORTModule(Extra()), nn.ModuleDict({"part": ORTModule(Extra())})
    with torch.no_grad():
        ours.trunk.weight.zero_()
    state = {f"part.{name}": value for name, value in ours.state_dict().items()}
    assert set(other.state_dict()) == set(state)
    other.load_state_dict(state)
    assert other["part"].loaded == 3 and not other["part"].trunk.weight.any()
    with pytest.raises(RuntimeError, match="Missing key"):
        ours.load_state_dict({})


def test_copies() -> None:
    ours = ORTModule(nn.Linear(6, 2), {"utils": {"cache_exports": False}})
    ours(X)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert isinstance(other, ORTModule) and other.weight is not ours.weight
        close(other(X), ours(X))


class Steps(nn.Module):
    """Returns numbers that it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.step, self.log = nn.Linear(6, 2), 0, {"rows": 0.5}

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        before = self.step
        self.step += 1
        self.log["rows"] += 2
        return {"out": self.linear(x), "step": self.step, "next": self.step + 1, "before": before, "log": self.log}


def test_numbers_among_the_results() -> None:
    module = Steps()
    eager, ours = copy.deepcopy(module), ORTModule(module, fallback="error")
    for _ in range(3):
        results, expected = ours(X), eager(X)
        close(results.pop("out"), expected.pop("out"))
        assert results == expected and results["log"] is module.log


class Counts:
    """A hook that can be copied."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


class Wrapper(ORTModule):
    """A class of a user's own."""


@pytest.mark.parametrize("duplicated", [copy.deepcopy, lambda ours: pickle.loads(pickle.dumps(ours))])
def test_copies_have_what_belongs_to_the_wrapper(duplicated: Any) -> None:
    ours = Wrapper(nn.Sequential(nn.Linear(6, 2)), {"debug": {"verify_every": 2}}, fallback="error")
    ours.register_forward_pre_hook(Counts())
    ours.register_forward_hook(Counts(), always_call=True)
    ours.register_full_backward_pre_hook(Counts())
    ours.register_full_backward_hook(Counts())
    ours.note = ours.itself = [ours.forward]  # the module's, which refers to the wrapper
    other = duplicated(ours)
    other(X).sum().backward()
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    assert [hook.calls for kind in kinds for hook in getattr(other, kind).values()] == [1, 1, 1, 1]
    assert [hook.calls for kind in kinds for hook in getattr(ours, kind).values()] == [0, 0, 0, 0]
    assert type(other).__mro__[1] is Wrapper and len(other) == 1 and ours[0].weight.grad is None
    assert other._fallback.policy == "error" and other._verifier is not None and other.note[0].args[0] is other
    assert type(duplicated(other)).__mro__[1] is Wrapper


def test_hooks_outside() -> None:
    ours, seen = ORTModule(nn.Linear(6, 2)), []
    ours.register_forward_pre_hook(lambda *_: seen.append("before"))
    ours.register_forward_hook(lambda *_: seen.append("after"))
    ours.register_full_backward_hook(lambda *_: seen.append("backward"))
    ours.weight.register_hook(lambda gradient: gradient * 2)
    ours.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    ours(X).sum().backward()
    close(ours.weight.grad, torch.full((2, 6), 8.0))
    assert seen[:2] == ["before", "after"] and sorted(seen[2:]) == ["accumulated", "backward"]


@pytest.mark.parametrize(
    ("module", "error", "text"),
    [
        (lambda: "model", TypeError, "must be a torch.nn.Module"),
        (lambda: ORTModule(nn.Linear(1, 1)), TypeError, "an ORTModule already"),
        (lambda: nn.DataParallel(nn.Linear(1, 1)), TypeError, r"DataParallel\(ORTModule\(model.module\)\)"),
        (lambda: torch.jit.script(nn.Linear(1, 1)), TypeError, "TorchScript"),
        (lambda: torch.compile(nn.Linear(1, 1)), TypeError, "_orig_mod"),
    ],
)
def test_modules_that_are_refused(module: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ORTModule(module())


def test_data_parallel_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel\(ORTModule\(model\)\)"):
        ORTModule(nn.Linear(1, 1))._replicate_for_data_parallel()  # what DataParallel calls


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\['utils.grad_norm_clip'\] have no effect on an ORTModule"):
        ORTModule(nn.Linear(1, 1), {"utils": {"grad_norm_clip": True, "random_numbers": "pytorch"}})
    with pytest.raises(ValueError, match="Invalid options"):
        ORTModule(nn.Linear(1, 1), {"utils": {"kernel": "pytorch"}})


def test_an_argument_that_can_be_no_constant() -> None:
    with pytest.raises(TypeError, match="pass arrays as tensors"):
        ORTModule(nn.Linear(6, 2), fallback="error")(X.numpy())


class Marked:
    """As ``FSDPModule`` does, its method looks for what was attached to the object that has this class."""

    def mark(self) -> str:
        return marks[self]


marks: dict[Any, str] = {}


def test_what_another_class_adds_is_the_wrappers() -> None:
    ours = ORTModule(nn.Linear(6, 2))
    ours.__class__ = type("MarkedLinear", (Marked, nn.Linear), {})
    marks[ours] = "of the wrapper"
    assert ours.mark() == "of the wrapper" and isinstance(ours, (Marked, ORTModule)) and type(ours.module) is nn.Linear
    ours.__class__ = type("OtherLinear", (nn.Linear,), {"in_features": property(lambda module: 7)})
    assert ours.in_features == 7 and ours.mark() == "of the wrapper"


def test_a_model_that_is_divided_among_processes() -> None:
    model = nn.Sequential(nn.Linear(6, 2))
    model[0].weight.device_mesh = None  # as DTensor has
    with pytest.raises(TypeError, match=r"\['0.weight'\] of Sequential are divided .*: shard outside, fully_shard"):
        ORTModule(model)


def test_what_lightning_trains_is_wrapped_inside() -> None:
    class LightningModule(nn.Linear):
        """Stands for Lightning's."""

    class Classifier(LightningModule):
        pass

    with pytest.warns(UserWarning, match=r"training_step\(\) of Classifier.*self.model = ORTModule\(self.model\)"):
        ORTModule(Classifier(2, 2))

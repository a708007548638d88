"""Which optimizers and schedules can a drawn case have? PyTorch's, and the package's that are the same."""

from __future__ import annotations

__all__ = ["OPTIMIZERS", "OVERWRITING", "SCHEDULES"]

_SPLIT = "[dict(params=[p for p in model.parameters() if p.dim() > 1], weight_decay=0.1), " + (
    "dict(params=[p for p in model.parameters() if p.dim() < 2])]"
)
_NAMES = "[dict(params=[n for n, p in model.named_parameters() if p.dim() > 1], weight_decay=0.1)]"
# In place of a config, the optimizer itself, whose own step is taken.
_ITSELF = "optimizer()"

# Name -> PyTorch's optimizer, and what the trainer gets.
OPTIMIZERS: dict[str, tuple[str, str]] = {
    "sgd": ("torch.optim.SGD(model.parameters(), lr=0.1)", "optim.SGDConfig(lr=0.1)"),
    "sgd with momentum": (
        "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)",
        "optim.SGDConfig(lr=0.05, momentum=0.9, weight_decay=0.01)",
    ),
    "nesterov": (
        "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8, nesterov=True)",
        "optim.SGDConfig(lr=0.05, momentum=0.8, nesterov=True)",
    ),
    "dampening": (
        "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8, dampening=0.3)",
        "optim.SGDConfig(lr=0.05, momentum=0.8, dampening=0.3)",
    ),
    "adamw": (
        "torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)",
        "optim.AdamWConfig(lr=0.01, eps=1e-3)",
    ),
    "adam config": (
        "torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.99), eps=1e-4, weight_decay=0.1)",
        "optim.AdamConfig(lr=0.01, alpha=0.8, beta=0.99, epsilon=1e-4, lambda_coef=0.1)",
    ),
    "groups": (f"torch.optim.AdamW({_SPLIT}, lr=0.01, eps=1e-3)", f"optim.AdamWConfig({_NAMES}, lr=0.01, eps=1e-3)"),
    "groups of sgd": (
        f"torch.optim.SGD({_SPLIT}, lr=0.05, momentum=0.5)",
        f"optim.SGDConfig({_NAMES}, lr=0.05, momentum=0.5)",
    ),
    "groups of rates": (
        "torch.optim.SGD([dict(params=[model.head.weight], lr=0.2, momentum=0.9), dict(params=["
        "p for n, p in model.named_parameters() if n != 'head.weight'])], lr=0.05, weight_decay=0.01)",
        "optim.SGDConfig([dict(params=['head.weight'], lr=0.2, momentum=0.9)], lr=0.05, weight_decay=0.01)",
    ),
    "a rate of 0": (
        "torch.optim.AdamW([dict(params=[model.head.bias], lr=0.0), dict(params=["
        "p for n, p in model.named_parameters() if n != 'head.bias'])], lr=0.01, eps=1e-3)",
        "optim.AdamWConfig([dict(params=['head.bias'], lr=0.0)], lr=0.01, eps=1e-3)",
    ),
    "sgd, followed": (
        "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)",
        "optim.from_torch(optimizer())",
    ),
    "adamw, followed": (f"torch.optim.AdamW({_SPLIT}, lr=0.01, eps=1e-3)", "optim.from_torch(optimizer())"),
    "sgd itself": ("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)", _ITSELF),
    "adam itself": ("torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3, amsgrad=True)", _ITSELF),
    "adam with decay": ("torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1)", _ITSELF),
    "rmsprop": ("torch.optim.RMSprop(model.parameters(), lr=0.01, eps=1e-3, momentum=0.5)", _ITSELF),
    "adagrad": ("torch.optim.Adagrad(model.parameters(), lr=0.05, eps=1e-3)", _ITSELF),
    "adadelta": ("torch.optim.Adadelta(model.parameters(), lr=1.0, eps=1e-3)", _ITSELF),
    "adamax": ("torch.optim.Adamax(model.parameters(), lr=0.01, eps=1e-2)", _ITSELF),
    "nadam": ("torch.optim.NAdam(model.parameters(), lr=0.01, eps=1e-3)", _ITSELF),
    "radam": ("torch.optim.RAdam(model.parameters(), lr=0.01, eps=1e-3)", _ITSELF),
    "asgd": ("torch.optim.ASGD(model.parameters(), lr=0.05)", _ITSELF),
    "maximize": ("torch.optim.SGD(model.parameters(), lr=0.01, maximize=True)", _ITSELF),
}

_WARM = "torch.optim.lr_scheduler.LambdaLR(o, lambda n: n / 2 if n < 2 else max(0.0, (8 - n) / 6))"


def _function(text: str) -> tuple[str, str]:
    return f"torch.optim.lr_scheduler.LambdaLR(o, {text})", text


def _of_torch(text: str) -> tuple[str, str]:
    return tuple(f"torch.optim.lr_scheduler.{text}".format(o) for o in ("o", "OPTIMIZER"))  # type: ignore[return-value]


# Name -> PyTorch's schedule of an optimizer o, and what the trainer gets: PyTorch's only over PyTorch's optimizer.
SCHEDULES: dict[str, tuple[str, str]] = {
    "": ("None", "None"),
    "inverse": _function("lambda n: 1 / (n + 1)"),
    "halved": _function("lambda n: 0.5 ** n"),
    "warm-up": _function("lambda n: min(1.0, (n + 1) / 3)"),
    "linear": (_WARM, "optim.LinearWarmupLRScheduler(total_steps=8, warmup=0.25)"),
    "step": _of_torch("StepLR({}, 2, 0.5)"),
    "exponential": _of_torch("ExponentialLR({}, 0.7)"),
    "cosine": _of_torch("CosineAnnealingLR({}, 4)"),
    "restarts": _of_torch("CosineAnnealingWarmRestarts({}, 2)"),
    "one cycle": _of_torch("OneCycleLR({}, 0.1, total_steps=9, cycle_momentum=False)"),
    "multiplied": _of_torch("MultiplicativeLR({}, lambda n: 0.9)"),
    "sequence": _of_torch(
        "SequentialLR({0}, [torch.optim.lr_scheduler.ConstantLR({0}, 0.1, 2), "
        "torch.optim.lr_scheduler.ExponentialLR({0}, 0.5)], [2])"
    ),
}
# Those that overwrite a rate which is written into the optimizer.
OVERWRITING = ("inverse", "halved", "warm-up", "linear")

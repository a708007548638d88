"""Which optimizers can a drawn case have? PyTorch's, and the package's config that is the same."""

from __future__ import annotations

__all__ = ["OPTIMIZERS"]

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

"""What can a user do between two steps? A table of source text."""

from __future__ import annotations

__all__ = ["CHANGES", "OF_A_LAYER"]

# Name -> a statement.
CHANGES: dict[str, str] = {
    "freeze the first": "next(model.parameters()).requires_grad_(False)",
    "thaw the first": "next(model.parameters()).requires_grad_(True)",
    "freeze the head": "model.head.weight.requires_grad_(False)",
    "shrink in place": "with torch.no_grad(): [p.mul_(0.9) for p in model.parameters()]",
    "another memory": "model.head.weight.data = model.head.weight.data * 0.9",
    "load": "model.load_state_dict({n: t * 0.9 for n, t in model.state_dict().items() if t.dim()}, strict=False)",
    "evaluate": "model.eval(); model(*inputs(step), **extra(step)); model.train()",
    "hook on the head": "model.head.register_forward_hook(lambda m, x, y: y * 1.5)",
    "hook before the head": "model.head.register_forward_pre_hook(lambda m, x: (x[0] * 0.5,))",
    "evaluation mode of children": "[m.eval() for m in model.children()]",
    "training mode": "model.train()",
    "learning rate": "OPTIMIZER.param_groups[0]['lr'] *= 0.5",
    "draw": "torch.rand(3)",
}

# What the code of a layer contains -> statements.
OF_A_LAYER: dict[str, tuple[str, ...]] = {
    "nn.Dropout": ("model.{n}.p = 0.25", "model.{n}.eval()"),
    "nn.AlphaDropout": ("model.{n}.p = 0.3",),
    "nn.BatchNorm": ("model.{n}.eval()", "model.{n}.momentum = 0.35", "model.{n}.eps = 0.1"),
    "= nn.LayerNorm": ("model.{n}.eps = 0.1",),
    "= nn.RMSNorm": ("model.{n}.eps = 0.1",),
    "nn.LeakyReLU": ("model.{n}.negative_slope = 0.9",),
    "nn.ELU": ("model.{n}.alpha = 0.3",),
    "nn.Threshold": ("model.{n}.value = 0.1",),
    "nn.MultiheadAttention": ("model.{n}.dropout = 0.2", "model.{n}.eval()"),
    "nn.TransformerEncoderLayer": ("model.{n}.norm_first = True", "model.{n}.eval()"),
    "= nn.Linear({w}, {w})": ("model.{n}.forward = lambda x: x",),
    "register_buffer": ("model.{n}.mul_(2)", "model.{n} = model.{n} + 1"),
    "= nn.Parameter(": ("model.{n}.data.mul_(0.5)",),
    "Scaled(": ("model.{n}.eval()", "model.{n}.mean.zero_()"),
    "nn.LSTM": ("model.{n}.eval()",),
    "nn.Sequential": ("model.{n}.eval()", "model.{n}[0].register_forward_hook(lambda m, x, y: y * 0.5)"),
}

"""How does a model take its inputs, and what does it return? Tables of source text."""

from __future__ import annotations

__all__ = ["ARGUMENTS", "CONSTANTS", "INPUTS", "LABELS", "OUTPUTS", "RETURNED", "ROOTS", "TAGS"]

# Name -> code before the model, what it returns, an expression of h and x, and what the loss reads of it, p.
OUTPUTS: dict[str, tuple[str, str, str]] = {
    "": ("", "h", "p"),
    "pair": ("", "h, h.tanh()", "p[0]"),
    "pair, both read": ("", "h, h.tanh()", "p[0] + p[1].mean()"),
    "list": ("", "[h, h * 2]", "p[1]"),
    "three, one read": ("", "h.sin(), h.detach() * 2, h", "p[2]"),
    "dict": ("", "{'logits': h, 'loss': h.square().mean()}", "p['logits']"),
    "dict, all read": ("", "{'logits': h, 'penalty': h.square().mean()}", "p['logits'] * p['penalty']"),
    "nested": ("", "{'a': (h, {'b': h.sin()}), 'c': [h.mean(0)]}", "p['a'][0] + p['a'][1]['b']"),
    "named tuple": (
        "import collections\nNamed = collections.namedtuple('Named', 'label input')",
        "Named(h, h + 1)",
        "p.label",
    ),
    "dataclass": (
        "@dataclasses.dataclass\nclass Result:\n    logits: torch.Tensor\n    hidden: torch.Tensor",
        "Result(h, h.relu())",
        "p.logits + p.hidden",
    ),
    "output of a library": (
        "from transformers.utils import ModelOutput\n@dataclasses.dataclass\nclass Result(ModelOutput):\n"
        "    logits: torch.Tensor = None\n    unset: torch.Tensor = None\n    hidden: tuple = None",
        "Result(logits=h, hidden=(h.sin(), h.cos()))",
        "p.logits + p['hidden'][1]",
    ),
    "none between": ("", "h, None, h + 1", "p[2]"),
    "number at the end": ("", "h, 3", "p[0] * p[1]"),
    "the same twice": ("", "h, h", "p[0] + p[1]"),
    "a weight": ("", "h, self.head.weight, self.head.bias * 2", "p[0] + 0.1 * p[1].square().mean()"),
    "an input": ("", "h, x", "p[0]"),
    "a part": ("", "h, h[:1], h.flatten()", "p[0] + p[1].sum()"),
    "integers": ("", "h, h.detach().round().long(), h > 0", "p[0] * (1 + p[2].to(p[0].dtype).mean())"),
    "a scalar": ("", "h, h.mean(), h.sum()", "p[0] + p[1]"),
    "another dtype": ("", "h, h.double()", "p[0] + p[1].mean().to(p[0].dtype)"),
    "keys with dots": ("", "{'a.b': h, 'a': {'b': h * 2}, 'a_b': h * 3}", "p['a']['b']"),
    "keys that are numbers": ("", "{0: h, '0': h * 2, 1: h}", "p['0']"),
    "nothing": ("", "h, h[:0]", "p[0]"),
}
# What a model with its loss returns, of the loss l, what else it returns, o, and the prediction h.
RETURNED = {
    "loss": "l",
    "tuple": "l, o",
    "dict": "{'loss': l, 'logits': o}",
    "loss at the end": "{'logits': o, 'loss': l}",
    "two losses": "{'aux_loss': l * 2, 'loss': l, 'output': o}",
    "of shape 1": "l[None], h",
}
# Name -> the argument x, an expression of a batch's x, and code in forward that makes it a tensor again.
INPUTS: dict[str, tuple[str, str]] = {
    "": ("x", ""),
    "pair": ("(x, x * 2)", "x = x[0] if x[0].dtype == torch.long else x[0] + x[1]"),
    "list": ("[x, x.double()]", "x = x[0]"),
    "dict": ("{'a': x, 'b': x + 1}", "x = x['a']"),
    "keys with dots": ("{'a': {'b': x}, 'a.b': x * 0}", "x = x['a']['b']"),
    "nested": ("({'x': [x]}, None, 0.5, (x,))", "x = x[0]['x'][0]"),
    "keys that are numbers": ("{'0': x, 0: x * 0}", "x = x['0']"),
    "array": ("x.numpy()", "x = torch.as_tensor(x)"),
}
# Name -> the labels, an expression of a batch's y, what the loss takes, and what it reads.
LABELS: dict[str, tuple[str, str, str]] = {
    "": ("y", "y", "y"),
    "dict": ("{'a': y, 'b': y}", "y", "y['a']"),
    "pair": ("(y, y.double())", "y", "y[0]"),
    "two": ("y, torch.full((), 0.5)", "y, z", "y"),
    "two, both read": ("y, y.double() / 2", "y, z", "y + (z - z).to(y.dtype)"),
    "keyword": ("y", "y, *, z=None", "y"),
}
# Name -> a further argument, an expression of the step, and what it does.
CONSTANTS: dict[str, tuple[str, str]] = {
    "number": ("1.0 + step % 3", "h = h * scale"),
    "integer": ("1 + step % 2", "h = torch.cat([h] * scale, 0)[: h.shape[0]] * scale"),
    "flag": ("step % 2 == 0", "h = -h if scale else h"),
    "text": ("'ab'[step % 2]", "h = h.tanh() if scale == 'a' else h"),
    "none": ("None if step % 2 else torch.ones(1)", "h = h if scale is None else h + scale.to(h.dtype)"),
    "numbers": ("(0.5, [step])", "h = h * scale[0] + scale[1][0]"),
}
# Names of the arguments x, mask and y.
ARGUMENTS = (
    ("input", "attention_mask", "label"),
    ("loss", "grad", "output"),
    ("label", "input", "loss"),
    ("head_weight", "output", "prediction"),
    ("output_0", "random_0", "left_0"),
    ("condition_0", "weight_grad", "target"),
    ("batch", "step", "names"),
    ("args", "training", "kwargs"),
    ("model", "module", "names"),
    ("sequence", "x_0", "x_"),
    ("lr", "learning_rate", "gradient_weight"),
    ("größe", "_", "_y"),
)
# Names of attributes of the model.
ROOTS = (
    *("x", "y", "mask", "loss", "label", "input", "output", "scale", "left", "condition_0", "weight_grad", "output_0"),
    *("head_weight", "step", "optimizer", "model", "loss_fn", "batch", "module", "random_0", "__loss_scale_input_name"),
)
# Names within a ParameterDict or a ModuleDict.
TAGS = (
    *("weight", "weight_grad", "weight_exp_avg", "weight_updated", "exp_avg", "exp_avg_sq", "step", "momentum_buffer"),
    *("a b", "a/b", "a:b", "a_b", "a-b", "a__b", "A_B", "0", "00", "-1", "ä", "∂", "class", "None", "grad", "data"),
    *(
        "{x}",
        "%s",
        "*",
        "'",
        '"',
        "\\",
        "\n",
        " ",
        "a" * 300,
        "loss",
        "x",
        "Moment_1",
        "Update_Count",
        "lr",
        "\t",
        "😀",
    ),
)

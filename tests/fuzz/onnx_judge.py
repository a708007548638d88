"""Is a drawn ONNX model computed as by ONNX's reference, and its gradient the quotient of differences?

``python -m tests.fuzz.onnx_judge --minutes 20`` draws cases; ``--seed`` begins elsewhere, and ``--case`` repeats one.
"""

from __future__ import annotations

import argparse
import collections
import logging
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper as H
from onnx import numpy_helper as N
from onnx.reference import ReferenceEvaluator

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.core.errors import ExportError
from ort_trainer.onnx.module import OnnxModule

from .onnx_graphs import Case, draw

__all__ = ["BAD", "judge", "run"]

BAD = ("wrong", "raw error")
# One case in so many is also trained, which takes a second; the others run as a module.
_TRAINED = 8
_LR = 0.1
_TOLERANCE = 1e-6
# Casts to float32 around what is quantized.
_SINGLE = 1e-4
_STEP = 1e-5


def _tensors(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Returns the tensors of a graph and its bodies: initializers, and those of Constant nodes by output."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant":
                found[node.output[0]] = attribute.t
            elif attribute.HasField("g"):
                found |= _tensors(attribute.g)
    return found


def _evaluate(model: onnx.ModelProto, x: Any, weights: dict[str, Any], names: list[str] | None = None) -> list[Any]:
    """Returns outputs as ONNX's reference computes them with other weights."""
    other = onnx.ModelProto()
    other.CopyFrom(model)
    tensors = _tensors(other.graph)
    for name, value in weights.items():
        tensors[name].CopyFrom(N.from_array(value, tensors[name].name))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return list(ReferenceEvaluator(other).run(names, {"x": x}))


def _straight_through(case: Case) -> onnx.ModelProto:
    """Returns the model with the derivative of its straight-through gradient: clip(x), shifted to the same result."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    inner = [name for q in case.quantized for name in (q.x, q.y, q.scale, q.zero)]
    whole = onnx.ModelProto()
    whole.CopyFrom(case.model)
    whole.graph.output.extend(H.make_empty_tensor_value_info(name) for name in inner if name != "x")
    values = {"x": case.x}
    values |= {name: N.to_array(t) for name, t in _tensors(case.model.graph).items()}
    names = [name for name in dict.fromkeys(inner) if name not in values]
    values |= dict(zip(names, _evaluate(whole, case.x, {}, names), strict=True))
    replaced: dict[int, list[onnx.NodeProto]] = {}
    for q in case.quantized:
        scale, zero = float(values[q.scale]), int(values[q.zero])
        low, high = ((limit - zero + side) * scale for limit, side in zip(q.limits, (-0.5, 0.5), strict=True))
        tensors = {"low": np.float64(low), "high": np.float64(high)}
        tensors["shift"] = values[q.y] - values[q.x].clip(low, high)
        for kind, value in tensors.items():
            model.graph.initializer.append(N.from_array(np.asarray(value), f"{q.y}.{kind}"))
        clip = H.make_node("Clip", [q.x, f"{q.y}.low", f"{q.y}.high"], [f"{q.y}.clip"])
        replaced |= {node: [] for node in q.nodes}
        replaced[q.nodes[-1]] = [clip, H.make_node("Add", [f"{q.y}.clip", f"{q.y}.shift"], [q.y])]
    nodes = [other for i, node in enumerate(case.model.graph.node) for other in replaced.get(i, [node])]
    model.graph.ClearField("node")
    model.graph.node.extend(nodes)
    return model


def _slopes(case: Case, directions: dict[str, Any]) -> tuple[list[float], bool]:
    """Returns quotients of differences along a direction, with two steps, and whether they are others on each side."""
    smooth = _straight_through(case) if case.quantized else case.model
    middle = _evaluate(smooth, case.x, {}, ["loss"])[0]
    slopes, is_kink = [], False
    for step in (_STEP, _STEP / 7):
        above, below = (_evaluate(smooth, case.x, case.moved(directions, by), ["loss"])[0] for by in (step, -step))
        slopes.append(float(above - below) / (2 * step))
        # Such as the largest of values of which several are equal, as quantized ones often are.
        is_kink |= abs(float(above - 2 * middle + below)) / step > 1e-3 * (1 + abs(slopes[0]))
    return slopes, is_kink


def _trained(case: Case, gradients: dict[str, torch.Tensor]) -> str:
    """Trains a step; returns what differs from the module's gradient."""
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}, "device": {"id": "cpu"}})
    trainer = ORTTrainer(case.model, "auto", optim.SGDConfig(lr=_LR), options=options)
    trainer.train_step(x=torch.from_numpy(case.x))
    for name, gradient in gradients.items():
        step = (torch.from_numpy(case.weights[name]) - trainer.get_parameter(name)) / _LR
        if not torch.allclose(step, gradient, rtol=1e-6, atol=_SINGLE if case.quantized else 1e-9):
            return f"a step of {name}: {step.flatten()[:3].tolist()} instead of {gradient.flatten()[:3].tolist()}"
    return ""


def judge(case: Case, seed: int) -> tuple[str, str]:
    """Returns the outcome of a case (equal, dropped, refused, wrong or raw error) and its reason."""
    try:
        expected = _evaluate(case.model, case.x, {})
    except Exception as error:
        return "dropped", f"the reference fails: {type(error).__name__}: {error}"
    if not all(np.isfinite(value).all() and np.abs(value).max(initial=0) < 1e6 for value in expected):
        return "dropped", "not finite"
    tolerance = _SINGLE if case.quantized else _TOLERANCE
    rng = np.random.default_rng(seed)
    directions = {name: rng.normal(size=value.shape) for name, value in case.weights.items()}
    try:
        module = OnnxModule(case.model)
        names = {theirs: ours for ours, theirs in module.names.items()}
        if set(names) != set(case.weights):
            return "wrong", f"weights {sorted(set(names) ^ set(case.weights))}"
        outputs = list(module(torch.from_numpy(case.x)).values())
        for value, output, info in zip(expected, outputs, case.model.graph.output, strict=True):
            if not np.allclose(output.detach().numpy(), value, rtol=tolerance, atol=tolerance):
                shaken = _evaluate(case.model, case.x, case.moved(directions, 1e-7))
                if any(np.abs(a - b).max() > tolerance for a, b in zip(shaken, expected, strict=True)):
                    return "dropped", "a rounding at its edge"
                return "wrong", f"{info.name}: {output.flatten()[:3].tolist()} instead of {value.flatten()[:3]}"
        parameters = {name: module.get_parameter(names[name]) for name in case.weights}
        reached = outputs[0].requires_grad
        found: Sequence[torch.Tensor | None] = [None] * len(parameters)
        if reached:
            found = torch.autograd.grad(outputs[0], list(parameters.values()), allow_unused=True)
        gradients = {n: p * 0 if g is None else g for (n, p), g in zip(parameters.items(), found, strict=True)}
        slope = sum(float((g.detach() * torch.from_numpy(directions[n])).sum()) for n, g in gradients.items())
        slopes, is_kink = _slopes(case, directions)
        size = 1 + abs(slopes[0])
        if is_kink or abs(slopes[0] - slopes[1]) > tolerance * size:
            return "dropped", "a kink"
        if not abs(slope - slopes[1]) <= 10 * tolerance * size:
            return "wrong", f"the derivative is {slope} instead of {slopes[1]}"
        if reached and seed % _TRAINED == 0:
            difference = _trained(case, gradients)
            return ("wrong", difference) if difference else ("equal", "")
    except Exception as error:
        kind = "refused" if isinstance(error, ExportError) and error.__cause__ is None else "raw error"
        return kind, f"{type(error).__name__}: {error}"[:500]
    return "equal", ""


def run(
    seed: int, count: int, seconds: float, clock: Callable[[], float] = time.process_time
) -> tuple[collections.Counter[str], list[str]]:
    """Judges cases from a seed on until the time is over; returns the outcomes, and a line for each failure."""
    outcomes: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    end = clock() + seconds
    for number in range(seed, seed + count):
        outcome, reason = judge(draw(number), number)
        outcomes[outcome] += 1
        if outcome in (*BAD, "refused") or "reference" in reason:
            line = f"CASE={number} {outcome}: {reason}"
            print(line, flush=True)
            failures += [line] if outcome in BAD else []
        if outcomes.total() % 100 == 0:
            print(dict(outcomes), flush=True)
        if clock() > end:
            break
    return outcomes, failures


def main() -> int:
    """Runs the command; returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", default="", help="of the first case; by default a fresh one")
    parser.add_argument("--case", default="", help="repeats one case, and prints its graph")
    given = parser.parse_args()
    logging.getLogger("ort_trainer").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if given.case:
        case = draw(int(given.case))
        print(onnx.printer.to_text(case.model))
        print(*judge(case, int(given.case)))
        return 0
    seed = int(given.seed) if given.seed else random.SystemRandom().randrange(10**8) * 100
    print(f"SEED={seed}", flush=True)
    outcomes, failures = run(seed, 10**9, 60 * given.minutes, time.monotonic)
    print(dict(outcomes), *failures, sep="\n")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())

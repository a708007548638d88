"""Computes the figures of a profile from the measured steps."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from ..step.origins import with_parents
from .profile import ModuleTime, OperatorTime, Profile
from .timing import MeasuredStep

# Prefixes of operators that consist mostly of matrix products; PyTorch's, then ONNX's.
_PRODUCTS = (
    *("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.addbmm", "aten.mv", "aten.addmv", "aten.dot"),
    *("aten.linear", "aten.convolution", "aten.mkldnn_", "aten._scaled_dot_product", "aten._convolution"),
    *("aten.addr", "aten._grouped_mm", "ort_trainer.grouped_mm", "ort_trainer.linear", "mkldnn."),
    *("MatMul", "Gemm", "Conv", "FusedMatMul", "FusedGemm", "FusedConv", "NhwcFusedConv", "TransposeMatMul", "Einsum"),
    *("LSTM", "GRU", "RNN", "Attention", "MultiHeadAttention"),
)


def is_product(operator: str) -> bool:
    """Returns whether an operator, by its name in a profile, consists mostly of matrix products."""
    return operator.startswith(_PRODUCTS)


def fill(profile: Profile, steps: Sequence[MeasuredStep], kinds: Mapping[str, str], remarks: Sequence[str]) -> None:
    """Writes the figures of steps whose runs have been collected into a profile.

    Args:
        profile: The profile.
        steps: The steps, at least one.
        kinds: Path and class name of the modules, in the model's order.
        remarks: Remarks for the report.
    """
    remarks = list(remarks)
    complete = [step for step in steps if all(run.is_complete for run in step.runs)]
    if len(complete) < len(steps):
        remarks.append(
            f"the figures cover only {len(complete)} of the {len(steps)} steps: ONNX Runtime's profiler records at "
            "most a million events"
        )
    counted = complete or steps
    total = sum(step.duration for step in counted)
    updates = sum(end - start for step in counted for start, end in step.updates)
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    modules: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for operation in (operation for step in counted for run in step.runs for operation in run.operations):
        spent[operation.name] += operation.duration
        calls[operation.name] += not operation.is_part
        for path in () if operation.module is None else with_parents(operation.module):
            modules[path][operation.backward] += operation.duration

    def mean(nanoseconds: float) -> float:
        """Returns the milliseconds per step of a sum over all steps."""
        return nanoseconds / 1e6 / len(counted)

    profile.seconds = tuple(step.duration / 1e9 for step in steps)
    profile.milliseconds = mean(total)
    waits = [after.start - before.end for before, after in itertools.pairwise(steps)]
    profile.waiting = sum(waits) / max(len(waits), 1) / 1e6
    profile.operators = tuple(
        OperatorTime(name, calls[name] / len(counted), mean(time), time / total) for name, time in spent.most_common()
    )
    # Those outside of the model come last.
    order = [path for path in kinds if path in modules] + [path for path in modules if path not in kinds]
    profile.modules = tuple(
        ModuleTime(path, kinds.get(path, ""), mean(forward), mean(backward), (forward + backward) / total)
        for path, (forward, backward) in ((path, modules[path]) for path in order)
    )
    profile.products = mean(sum(time for name, time in spent.items() if is_product(name)))
    profile.optimizer = mean(updates)
    # If a session runs several nodes in parallel, operators may take more time in total than the step.
    profile.overhead = mean(max(total - updates - sum(spent.values()), 0))
    profile.kernels = " and ".join(dict.fromkeys(run.graph.kernels for step in steps for run in step.runs))
    profile.remarks, profile.done = tuple(remarks), True

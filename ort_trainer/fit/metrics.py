"""One interface for three kinds of evaluation metrics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.errors import shown, was_given


class Metrics:
    """Updates metrics with the outputs of an evaluation.

    Args:
        metrics: One metric, a list of metrics, or a dict of metrics by name. A metric is a function (outputs, labels)
            -> number; an object with ``update(outputs, labels)``, ``compute()`` and ``reset()``, as in torchmetrics; an
            object with ``add_batch(predictions=, references=)`` and ``compute()``, as in ``evaluate``; or a tuple of
            one of these and a function that converts the outputs to the metric's first argument.

    Raises:
        TypeError: If a metric is of no such kind.
        ValueError: If two have the same name.
    """

    def __init__(self, metrics: Any) -> None:
        if not isinstance(metrics, (Mapping, list)):
            metrics = [] if metrics is None else [metrics]
        named = metrics.items() if isinstance(metrics, Mapping) else [(None, metric) for metric in metrics]
        self._metrics = [_Metric(name, metric) for name, metric in named]
        _check_unique([metric.name for metric in self._metrics])

    def __len__(self) -> int:
        return len(self._metrics)

    @property
    def names(self) -> set[str] | None:
        """The names of their results; None if unknown because a metric may return several numbers."""
        return {m.name for m in self._metrics} if all(m.kind == "function" for m in self._metrics) else None

    def reset(self) -> None:
        """Starts an evaluation."""
        for metric in self._metrics:
            metric.reset()

    def update(self, outputs: Any, labels: Any, samples: int) -> None:
        """Adds the outputs and labels of a batch."""
        for metric in self._metrics:
            metric.update(outputs, labels, samples)

    def compute(self) -> dict[str, float]:
        """Returns the numbers by name; each name starts with ``eval_``."""
        results = [pair for metric in self._metrics for pair in metric.compute()]
        _check_unique([name for name, _ in results])
        return {f"eval_{name}": value for name, value in results}


class _Metric:
    """One metric of any of the three kinds."""

    def __init__(self, name: Any, metric: Any) -> None:
        self._prepare: Callable[[Any], Any] | None = None
        if isinstance(metric, tuple) and len(metric) == 2 and callable(metric[1]):
            metric, self._prepare = metric
        self._metric, self._named = metric, name is not None
        is_object = not isinstance(metric, type)
        if is_object and all(hasattr(metric, part) for part in ("update", "compute", "reset")):
            self.kind = "object"
        elif is_object and all(hasattr(metric, part) for part in ("add_batch", "compute")):
            self.kind = "batches"
        elif is_object and callable(metric):
            self.kind = "function"
        else:
            raise TypeError(
                f"a metric must be a function (outputs, labels) -> number, or have update(), compute() and reset(), or "
                f"add_batch() and compute(), but {was_given(metric)}"
            )
        if name is not None and not isinstance(name, str):
            raise TypeError(f"names of metrics must be str, but {shown(name)} was given")
        self.name: str = name or _name(metric)
        self.reset()

    def reset(self) -> None:
        self._sum, self._samples = 0.0, 0
        if self.kind == "object":
            self._metric.reset()

    def update(self, outputs: Any, labels: Any, samples: int) -> None:
        outputs = outputs if self._prepare is None else self._prepare(outputs)
        if self.kind == "object":
            self._metric.update(outputs, labels)
        elif self.kind == "batches":
            self._metric.add_batch(predictions=outputs, references=labels)
        else:
            self._sum += self._number(self._metric(outputs, labels)) * samples
            self._samples += samples

    def compute(self) -> list[tuple[str, float]]:
        if self.kind == "function":
            return [(self.name, self._sum / max(self._samples, 1))]  # a process may have no batch
        result = self._metric.compute()
        if not isinstance(result, Mapping):
            return [(self.name, self._number(result))]
        # A name from the user prefixes the names of several numbers, and replaces the name of a single one.
        alone, prefix = self._named and len(result) == 1, f"{self.name}_" if self._named else ""
        return [(self.name if alone else f"{prefix}{key}", self._number(value)) for key, value in result.items()]

    def _number(self, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"metric {self.name!r} must return a number, but it returned {shown(value)}") from error


def _name(metric: Any) -> str:
    """Returns a metric's own name; ``metric`` for a lambda, which has none."""
    while isinstance(metric, functools.partial):
        metric = metric.func
    given_name = getattr(metric, "__name__", None) or getattr(metric, "name", None)
    name = given_name if isinstance(given_name, str) else type(metric).__name__
    return "metric" if name == "<lambda>" else name


def _check_unique(names: Sequence[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1 or name == "loss"})
    if repeated:
        raise ValueError(f"metrics need unique names other than 'loss': rename {repeated} with a dict, name -> metric")

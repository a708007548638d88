"""The signatures of the user's functions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Returns the signature of a function, without evaluating its annotations.

    From Python 3.14 on, ``inspect.signature`` evaluates them, which fails for names that are imported for type checkers
    only. A ``PeftModel`` of peft, whose ``forward`` takes anything, has the signature of the model inside.

    Raises:
        TypeError, ValueError: If it has none, as some built-in functions.
    """
    signature = _without_values(function)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    base = getattr(getattr(function, "__self__", None), "get_base_model", None)
    if base is not None and kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return signature_of(base().forward)
    return signature


def _without_values(function: Callable[..., Any]) -> inspect.Signature:
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)

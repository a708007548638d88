"""All parts of all files that this package reads: the table from which attacks are drawn.

An outline per container, and one per kind of part that occurs in several places (``=KIND``). ``*`` stands for any name
or number that is the user's. Each part is attacked by all of :data:`MUTATIONS`, unless its line names fewer after a
colon. A part that a writer adds is missing here until someone adds it: ``test_parts.py`` compares.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .attacks import paths_of
from .containers import CONTAINERS
from .readers import readers

__all__ = ["MUTATIONS", "Part", "parts_of", "table"]

MUTATIONS = ("wrong", "near", "swap", "drop", "rename", "twice", "more")
"""Another type or an absurd value; a value close to the right one; that of another part; no such key or element;
another name of it; the same key twice; a key or element more."""

OUTLINES = {
    "sealed": """
        metadata
          format ort_trainer.matrices/*
          manifest
            format version
            state
              step
              model/full_precision/*/$array
              optimizer/*/*/$array
              gradients/*/$array
              torch_optimizer
                state/*/*/$tensor
                param_groups/*
                  lr eps weight_decay amsgrad maximize foreach capturable differentiable fused decoupled_weight_decay
                  betas/* params/*
              trainer_options
                mixed_precision zero_stage world_rank world_size optimizer_name data_parallel_size
                horizontal_parallel_size gradient_accumulation_steps
              train_step_info
                optimization_step step
              window
                micro_batches reduction weight unit scale assigned_size
              random/$array
              outside/*
                value/* tensors/*/$array dtypes/*
              loss_scaler
                loss_scale stable_steps_count
              lr_scheduler/last_lr/*
            user
              epoch x/*/y scores/*/a/$tuple/*/$set/*
              fit=PLACE
                others
                state
                  batch batches since loss_sum loss_samples completed recorded used/*
                  history/*
                    epoch step update loss learning_rate grad_norm samples_per_second eval_loss
                callbacks/*
                  monitor best waited
            run
              number step between_epochs metrics/*
            position/places/*=PLACE
          ort_trainer.checkpoint
            version export schedule optimization_step properties nominal micro_batches trainer has_optimizer
            trainable/* learning_rates/* order/*/* shapes/*/*/*
        tensors/*
          dtype shape/* data
    """,
    "PLACE": """
        epoch batch batches order ended loader random=GENERATORS epoch_random=GENERATORS
    """,
    "GENERATORS": """
        torch/$tensor loader/*/$tensor python/*/* python/$tuple/*/$tuple/*
        numpy
          bit_generator has_gauss gauss
          state
            pos key/$array
    """,
    "HDF5": """
        user_dict model/full_precision/* optimizer/*/*
        train_step_info
          optimization_step step
        trainer_options
          data_parallel_size horizontal_parallel_size mixed_precision optimizer_name world_rank world_size zero_stage
    """,
    "JSON": """
        peft_type r lora_alpha lora_dropout bias task_type base_model_name_or_path inference_mode
        target_modules/* modules_to_save/*
    """,
    "ONNX": """
        irVersion producerName producerVersion : wrong drop
        graph=GRAPH opsetImport/*=OPSET
        metadataProps/*
          key
          value=STEP
            name rates learning_rate weights/*/* layers/* trained/* frozen/* buffers
            lora
              rank alpha dropout targets/* also_train/* exclude
        functions/*
          name domain input/* output/* node/*=NODE opsetImport/*=OPSET
    """,
    "GRAPH": """
        name docString : wrong drop
        node/*=NODE initializer/*=TENSOR input/*=VALUE output/*=VALUE valueInfo/*=VALUE
    """,
    "NODE": """
        docString : wrong drop
        name opType domain input/* output/*
        attribute/*
          name type f i s ints/* g=GRAPH t=TENSOR
        metadataProps/*
          key value
    """,
    "TENSOR": """
        name dataType dims/* rawData floatData/* int32Data/* int64Data/* dataLocation
        externalData/*
          key value
    """,
    "VALUE": """
        name
        type
          tensorType=TENSOR_TYPE sequenceType/elemType/tensorType=TENSOR_TYPE
    """,
    "TENSOR_TYPE": """
        elemType
        shape/dim/*
          dimValue dimParam
    """,
    "OPSET": """
        domain version
    """,
    "STEP": """
        format kind export loss reset inputs/*=SPEC outputs/*=SPEC gradients/* gradients/*/* buffer_updates/* guards/*
        fixed/* origins random/*=SPEC loss_scale=SPEC
        state/*
          input output dtype initial shape/*
        index_ranges/*
          input size from_end ignored operator source steps outputs/*
    """,
    "SPEC": """
        name dtype kind shape/* parameters/*
    """,
    "export": """
        head
          modes_read kept found remarks problems output notes reasons/*
        steps/*
          about
            programs step=STEP
          graph
            constants
            head
              constants calls/*/*/*
              programs/*
                symbols loops inputs/* steps/*/*/*/* results/*/*
    """,
    "bytes": "",
}


@dataclass
class Part:
    """A part of a file.

    Attributes:
        parts: Its parts by name.
        kind: The outline of more parts.
        mutations: How it is attacked.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    kind: str = ""
    mutations: tuple[str, ...] = MUTATIONS

    def all(self, path: str) -> Iterator[tuple[str, Part]]:
        """Yields the parts below with their paths."""
        for name, part in self.parts.items():
            yield f"{path}/{name}", part
            yield from part.all(f"{path}/{name}")


@functools.cache
def table() -> Mapping[str, Part]:
    """Returns the outlines by name."""
    return {kind: _read(outline) for kind, outline in OUTLINES.items()}


def _read(outline: str) -> Part:
    root = Part()
    levels = [(-1, root)]
    for line in filter(str.strip, outline.splitlines()):
        names, _, mutations = line.partition(" : ")
        depth = len(line) - len(line.lstrip())
        while levels[-1][0] >= depth:
            levels.pop()
        for path in names.split():
            path, _, kind = path.partition("=")
            part = levels[-1][1]
            for name in path.split("/"):
                part = part.parts.setdefault(name, Part())
            part.kind, part.mutations = kind, tuple(mutations.split()) or MUTATIONS
        levels.append((depth, part))
    return root


def find(form: str, path: tuple[Any, ...]) -> Part | None:
    """Returns the part at a path in a file of a container; None if the table has none."""
    owners = [table()[form]]
    for name in path:
        owners += [table()[owner.kind] for owner in owners if owner.kind]
        exact = [owner.parts[str(name)] for owner in owners if str(name) in owner.parts]
        owners = exact or [owner.parts["*"] for owner in owners if "*" in owner.parts]
        if not owners:
            return None
    return owners[0]


@functools.cache
def parts_of(name: str, content: bytes) -> Mapping[tuple[Any, ...], Part]:
    """Returns the parts of a reader's file by their paths; an unknown part is a KeyError."""
    form = readers()[name].form
    tree = CONTAINERS[form].tree(content)
    parts = {path: find(form, path) for path in (paths_of(tree) if form != "bytes" else ())}
    unknown = ["/".join(map(str, path)) for path, part in parts.items() if part is None]
    if unknown:
        raise KeyError(f"tests/hostile/parts.py lacks these parts of {name!r} ({form}): {unknown}")
    return {path: part for path, part in parts.items() if part is not None}

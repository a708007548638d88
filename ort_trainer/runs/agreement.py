"""Agreement between several processes before they save or load checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import CheckpointError, DistributedError
from ..core.sealed import read_header, verify

if TYPE_CHECKING:
    from ..trainer import ORTTrainer

__all__ = ["agree", "check_in_all"]


def agree(trainer: ORTTrainer, failure: Exception | None, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the values of all processes; raises in all of them if one has a failure."""
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    rows = [dict(values)] if trainer.world_size == 1 else trainer.gather({**values, "failure": text})
    if failure is not None:
        raise failure
    failed = [f"rank {rank}: {row['failure']}" for rank, row in enumerate(rows) if row.get("failure")]
    if failed:
        raise DistributedError(f"a checkpoint operation failed in another process: {'; '.join(failed)}")
    return rows


def check_in_all(trainer: ORTTrainer, path: Path) -> None:
    """Raises in all processes if the file is damaged in one of them; each may have its own disk."""
    said, name = "", repr(str(path))
    try:
        with path.open("rb") as file:
            verify(file, read_header(file, name), name)
    except (CheckpointError, OSError) as error:
        said = str(error)
    rows = trainer.gather({"damaged": said})
    damaged = [f"rank {rank}: {row['damaged']}" for rank, row in enumerate(rows) if row["damaged"]]
    if damaged:
        raise CheckpointError("; ".join(damaged))

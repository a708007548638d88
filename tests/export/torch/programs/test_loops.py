"""Where PyTorch's Inductor builds and loads compiled loops."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from ort_trainer import ExportError, optim

from ....helpers import mlp_batches, mlp_trainer


def test_inductor_works_in_a_folder_that_only_its_owner_can_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []

    def compile_nothing(*_: object, **__: object) -> None:
        folder = Path(cache_dir())
        assert folder.parent.stat().st_mode & 0o777 == 0o700 and folder.parent.stat().st_uid == os.getuid()
        folders.append(folder)
        raise RuntimeError("compiled nothing")

    monkeypatch.setattr(torch._inductor, "aot_compile", compile_nothing)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "anyone's"))
    trainer = mlp_trainer({"utils": {"kernels": "compiled"}}, optim.SGDConfig())
    with pytest.raises(ExportError, match="Inductor can't compile the graph.*compiled nothing"):
        trainer.train_step(*mlp_batches(1)[0])
    (folder,) = folders
    assert not folder.parent.exists() and os.environ["TORCHINDUCTOR_CACHE_DIR"].endswith("anyone's")

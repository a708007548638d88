"""What is compiled to loops, and where PyTorch's Inductor builds and loads them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx.experimental.proxy_tensor import make_fx

from ort_trainer import ExportError, optim
from ort_trainer.export.torch.lower.loops.compile import divide_for_loops

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


@pytest.mark.parametrize(
    "read",
    [
        lambda table, index: F.embedding(index, table),
        lambda table, index: F.embedding_bag(index[:, None], table),
        lambda table, index: table[index],
        lambda table, index: table.index_select(0, index),
        lambda table, index: table.gather(0, index[:, None]),
        lambda table, index: table.index_fill(0, index, 0.5),
        lambda table, index: F.nll_loss(table, index),
    ],
)
def test_only_checked_indices_are_read_in_loops(read: Callable[..., torch.Tensor]) -> None:
    """A loop that finds an index out of range ends the process."""

    def in_loops(index: Callable[[torch.Tensor], torch.Tensor], checked: bool) -> bool:
        def compute(table: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            return read(table, index(given)).sum().exp()

        graph = make_fx(compute, tracing_mode="fake")(torch.randn(5, 5), torch.zeros(5, dtype=torch.int64)).graph
        given = graph.find_nodes(op="placeholder")[1]
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        divided = divide_for_loops(nodes, (), {given} if checked else ())
        assert [node for group, _ in divided for node in group if node.name == "exp"]
        return all(of_loops for _, of_loops in divided)

    assert in_loops(lambda given: F.pad(given[1:], (0, 1)).int().long(), checked=True)
    assert not in_loops(lambda given: given, checked=False)
    assert not in_loops(lambda given: given * 2, checked=True)
    assert not in_loops(lambda given: torch.arange(len(given)), checked=True)


def test_rows_that_the_model_looks_up_come_before_the_loops() -> None:
    def compute(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x.sin() + F.embedding(torch.arange(len(x)) + 1, table).cos()

    graph = make_fx(compute, tracing_mode="fake")(torch.randn(5, 4), torch.randn(4, 4)).graph
    divided = divide_for_loops([node for node in graph.nodes if node.op == "call_function"], (), ())
    assert [[node.name for node in group] for group, _ in divided] == [
        ["arange", "add", "embedding"],
        ["sin", "cos", "add_1"],
    ]
    assert [of_loops for _, of_loops in divided] == [False, True]

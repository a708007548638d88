"""What is compiled to loops, and where PyTorch's Inductor builds and loads them."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx.experimental.proxy_tensor import make_fx

from ort_trainer import ExportError, optim
from ort_trainer.engine.programs import Program
from ort_trainer.engine.programs.compiler import LoadedCall, compiled
from ort_trainer.engine.programs.loops import EMPTY, RUN, VIEW, encode, encode_kernels, load
from ort_trainer.fx.values import is_view
from ort_trainer.kernels.loops import compile, divide
from ort_trainer.kernels.loops.compile import as_kernels
from ort_trainer.kernels.loops.divide import divide_for_loops

from ..helpers import mlp_batches, mlp_trainer


def test_inductor_works_in_a_folder_that_only_its_owner_can_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []

    def compile_nothing(*_: object, **__: object) -> None:
        folder = Path(cache_dir())
        assert folder.parent.stat().st_mode & 0o777 == 0o700 and folder.parent.stat().st_uid == os.getuid()
        folders.append(folder)
        raise RuntimeError("compiled nothing")

    monkeypatch.setattr(compile, "compile_fx_inner", compile_nothing)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / "anyone's"))
    trainer = mlp_trainer({"utils": {"kernels": "compiled"}}, optim.SGDConfig())
    with pytest.raises(ExportError, match="Inductor can't compile the graph.*compiled nothing"):
        trainer.train_step(*mlp_batches(1)[0])
    (folder,) = folders
    assert not folder.parent.exists() and os.environ["TORCHINDUCTOR_CACHE_DIR"].endswith("anyone's")


def test_source_that_launches_kernels_runs_in_another_folder(tmp_path: Path) -> None:
    """Here with loops of C++, which Inductor writes for a CPU; for a GPU they are Triton's."""

    def compute(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * y).tanh(), z.sum(1) * x.shape[0]

    module = make_fx(compute, tracing_mode="symbolic")(torch.randn(5, 4), torch.randn(4), torch.randn(5, 4))
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    sample = (*inputs[:2], inputs[0])  # one object for two inputs, as from equal layers
    folder = tmp_path / "inductor"
    with torch.no_grad():
        text = as_kernels(module, sample, folder)["loops"]
    shutil.rmtree(folder)
    run = load(text, torch.device("cpu"))[RUN]
    for rows in (3, 7):
        x, y = torch.randn(rows * 4 + 1)[1:].view(rows, 4), torch.randn(4)  # not at a multiple of 16 bytes
        z = torch.randn(rows, 4)
        torch.testing.assert_close(tuple(run([x, y, z])), compute(x, y, z))
    with pytest.raises(ValueError, match="can't be loaded: they were compiled for cpu, and are to run on cuda:1"):
        load(text, torch.device("cuda:1"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_functions_of_a_library_take_addresses_and_raise_their_message(tmp_path: Path) -> None:
    source = """
    extern "C" const char* negate(const float* values, float* results, const long size) {
        if (size < 0) return "a size is negative";
        for (long index = 0; index < size; index++) results[index] = -values[index];
        return nullptr;
    }
    """
    (tmp_path / "negate.cpp").write_text(source)
    library = tmp_path / "negate.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, tmp_path / "negate.cpp"], check=True)
    loops = encode(library.read_bytes(), {"negate": 3})
    program = Program([None], {"rows": (0, 0)}, loops=loops)
    size, one = {"dim": "dim('rows') * 3"}, {"dim": "dim('rows') * -1"}
    program.steps.append((EMPTY, [[{"dim": "dim('rows')"}, 3], [3, 1], {"torch": "float32"}], {}))
    program.steps.append(("loops.negate", [{"x": 0}, {"v": 0}, size], {}))
    program.steps.append((VIEW, [{"v": 0}, [3], [1], 3], {}))
    program.results.append((2, None))
    values = torch.randn(4, 3)
    for given in (values, values.t().contiguous().t()):  # loops get tensors as they were compiled for
        (second_row,) = run_program(program, [given])
        torch.testing.assert_close(second_row, -values[1])
    program.steps[1] = ("loops.negate", [{"x": 0}, {"v": 0}, one], {})
    with pytest.raises(RuntimeError, match="^a size is negative$"):
        run_program(program, [values])
    with pytest.raises(ValueError, match="not a program of PyTorch's operators.*loops.absent"):
        Program.from_text(Program(steps=[("loops.absent", [], {})], loops=loops).to_text())
    with pytest.raises(ValueError, match="can't be loaded"):
        Program.from_text(Program(steps=[(EMPTY, [], {})]).to_text())  # without loops, nothing makes unchecked memory


def run_program(program: Program, values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    call = LoadedCall("call", Program.from_text(program.to_text()), ["x"], ["y"])
    return compiled([call], ["x"], ["y"])([*values])


def test_files_that_name_the_folder_of_kernels_name_the_new_one(tmp_path: Path) -> None:
    group, binary = Path("triton", "__grp__kernel.json"), Path("triton", "kernel.cubin")
    (tmp_path / "triton").mkdir()
    (tmp_path / group).write_text(f'{{"kernel.cubin": "{tmp_path}/triton/kernel.cubin"}}')
    (tmp_path / binary).write_bytes(str(tmp_path).encode() + bytes(range(256)))
    source = "import os\ndef call(values): return [os.environ.get('TRITON_CACHE_DIR'), FOLDER]\n"
    source += "FOLDER = os.environ['TRITON_CACHE_DIR']\n"
    run = load(encode_kernels(source, tmp_path, torch.device("cpu")), torch.device("cpu"))[RUN]
    during_a_run, folder = run([])
    new = Path(str(folder)).parent
    assert during_a_run == os.environ.get("TRITON_CACHE_DIR") and new != tmp_path
    assert json.loads((new / group).read_text()) == {"kernel.cubin": f"{new}/triton/kernel.cubin"}
    assert (new / binary).read_bytes() == (tmp_path / binary).read_bytes()
    # A library that is in use must not be overwritten, although other kernels have the same.
    other = load(encode_kernels(f"{source}\n", tmp_path, torch.device("cpu")), torch.device("cpu"))[RUN]
    assert Path(str(other([])[1])).parent != new


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


def test_what_no_loop_reads_comes_after_them() -> None:
    """Such as the gradient of a table that is added to the scores of attention."""

    def compute(table: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wave = x.sin()
        return table.exp().index_add(0, torch.arange(4), wave).relu(), wave.cos().exp()

    graph = make_fx(compute, tracing_mode="fake")(torch.randn(5, 4), torch.randn(4, 4)).graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    own = {node for node in nodes if node.name in ("index_add", "relu")}
    with mock.patch.object(divide, "_can_be_compiled", lambda node, checked: node not in own):
        divided = divide_for_loops(nodes, (), ())
    assert [([node.name for node in group], of_loops) for group, of_loops in divided] == [
        (["sin", "exp", "arange", "cos", "exp_1"], True),
        (["index_add", "relu"], False),
    ]


def test_few_operators_between_others_stay_kernels() -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        for _ in range(30):
            x = x.sin()
        return x.tan().sin().cos().atan().exp()

    graph = make_fx(compute, tracing_mode="fake")(torch.randn(4)).graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    with mock.patch.object(divide, "_can_be_compiled", lambda node, checked: node.name not in ("tan", "atan")):
        divided = divide_for_loops(nodes, (), ())
        least = divide_for_loops(nodes[-5:], (), ())
    assert [(len(group), of_loops) for group, of_loops in divided if of_loops] == [(30, True)]
    assert [(len(group), of_loops) for group, of_loops in least if of_loops] == [(2, True), (1, True)]


def test_without_loops_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    def compute(x: torch.Tensor) -> torch.Tensor:
        for _ in range(30):
            x = x.sin().cos().tan()
        return x

    graph = make_fx(compute, tracing_mode="fake")(torch.randn(4)).graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    caplog.set_level(logging.INFO)
    with mock.patch.object(divide, "_can_be_compiled", lambda node, checked: not node.name.startswith("tan")):
        divided = divide_for_loops(nodes, (), ())
    assert not any(of_loops for _, of_loops in divided)
    assert "no loops: at most 2 operators in a row can be compiled, and fewer than 6 are not worth it" in caplog.text


def test_all_results_of_an_operator_stay_with_it() -> None:
    def compute(table: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        values, order = torch.arange(len(x)).sort(descending=True)
        return F.embedding(order, table).cos() * values[:, None]

    graph = make_fx(compute, tracing_mode="fake")(torch.randn(5, 4), torch.randn(4, 4)).graph
    nodes = [node for node in graph.nodes if node.op == "call_function" and not is_view(node)]
    divided = divide_for_loops(nodes, (), ())
    together = ["arange", "sort", "getitem", "getitem_1", "embedding"]
    assert [[node.name for node in group] for group, _ in divided] == [together, ["cos", "mul"]]
    (sort,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sort.default)
    ended = divide_for_loops(nodes, (), (), last={sort})
    assert [[node.name for node in group] for group, _ in ended] == [together[:4], together[4:], ["cos", "mul"]]

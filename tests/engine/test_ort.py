from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import onnx.parser
import onnxruntime
import pytest
import torch

from ort_trainer.engine import ort as engine

pytestmark = pytest.mark.engine


def test_maximum_opset_is_what_the_runtime_loads() -> None:
    import onnx
    from onnx import TensorProto, helper

    def loads(opset: int) -> bool:
        value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("a", "b")]
        graph = helper.make_graph([helper.make_node("Abs", ["a"], ["b"])], "g", value[:1], value[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        try:
            engine.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        except Exception:
            return False
        return True

    assert loads(18) and loads(engine.maximum_opset())
    assert engine.maximum_opset() <= onnx.defs.onnx_opset_version()


def test_imports_of_the_engine_leave_logging_and_the_path_alone() -> None:
    """A plain import of onnxruntime.training adds a handler to the root logger, and two folders to ``sys.path``."""
    program = """if True:
        import logging, sys
        import torch
        path = list(sys.path)
        import ort_trainer.compat
        from ort_trainer.engine.ort import engine
        engine()
        ort_trainer.compat.install()
        from onnxruntime.training import ORTTrainer
        assert not logging.getLogger().handlers and sys.path == path, (logging.getLogger().handlers, sys.path)
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
        logging.getLogger("mine").info("still heard")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "still heard", done.stderr


def test_process_undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library adds is removed again; a handler that another thread adds meanwhile stays."""
    root, handler = logging.getLogger(), logging.NullHandler()
    monkeypatch.setattr(root, "handlers", [])
    before = root.level, list(sys.path)
    with pytest.raises(ImportError), engine.process_undisturbed():
        logging.basicConfig(level=logging.CRITICAL)
        root.addHandler(handler)
        sys.path.append("elsewhere")
        raise ImportError
    assert (root.level, sys.path) == before and root.handlers == [handler]


def test_providers_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests the settings of CUDA's provider without a device."""

    class Stream:
        cuda_stream = 1234

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    providers = engine.providers_for(torch.device("cuda", 1), {"CUDAExecutionProvider": {"x": "y"}}, mem_limit=99)
    assert providers == [
        ("CUDAExecutionProvider", {"device_id": "1", "user_compute_stream": "1234", "gpu_mem_limit": "99", "x": "y"}),
        ("CPUExecutionProvider", {}),
    ]


@pytest.mark.engine
def test_a_range_that_is_an_output_and_an_index_is_computed() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        g (float[n, 2] table, int64 limit) => (int64[m] places, float[m, 2] rows)
        <int64 start = {0}, int64 step = {1}>
        { places = Range(start, limit, step) rows = Gather(table, places) }"""
    )
    session = engine.make_session(model.SerializeToString(), engine.own_options(), engine.providers_for(engine.CPU))
    table, places = np.arange(8, dtype=np.float32).reshape(4, 2), np.full(3, 7)
    binding = session.io_binding()
    binding.bind_cpu_input("table", table)
    binding.bind_cpu_input("limit", np.array(3))
    binding.bind_output("places", "cpu", 0, np.int64, places.shape, places.ctypes.data)
    binding.bind_output("rows", "cpu")
    session.run_with_iobinding(binding)
    assert places.tolist() == [0, 1, 2] and binding.get_outputs()[1].numpy().tolist() == table[:3].tolist()

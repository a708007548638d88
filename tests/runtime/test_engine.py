from __future__ import annotations

import onnxruntime
import pytest
import torch

from ort_trainer.runtime import engine

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


def test_flavours(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    engine.warn_about_mixed_flavours()
    assert not recwarn.list
    monkeypatch.setattr(engine, "installed_flavours", lambda: ("onnxruntime", "onnxruntime-training"))
    with pytest.warns(RuntimeWarning, match="onnxruntime, onnxruntime-training. They overwrite each other's files"):
        engine.warn_about_mixed_flavours()


def test_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be tried of CUDA without one."""
    monkeypatch.setattr(engine, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert engine.resolve_device("cuda", False) == torch.device("cuda", 0)
    assert engine.resolve_device("cuda:1", True) == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="device.id 'cuda:2' was asked for, but there are 2 CUDA devices"):
        engine.resolve_device("cuda:2", True)

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

"""The choice of the device, as far as it can be tested without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ort_trainer.engine.devices import as_default_generator, default_generator, limit_memory, resolve_device

CPU = torch.device("cpu")


def test_without_a_name_the_model_decides_and_then_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device(None, nn.Linear(2, 2).parameters()) == CPU
    assert resolve_device(None, nn.Linear(2, 2, device="meta").parameters()) == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert resolve_device(None, nn.Linear(2, 2).parameters()) == torch.device("cuda", 1)

    class OnGpu:
        device = torch.device("xpu", 1)

    assert resolve_device(None, [OnGpu()]) == torch.device("xpu", 1)
    assert resolve_device("cpu", [OnGpu()]) == CPU


def test_the_local_rank_chooses_a_device_without_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert resolve_device("cuda", local_rank=2) == torch.device("cuda", 2)
    assert resolve_device("cuda:1", local_rank=2) == torch.device("cuda", 1)
    assert resolve_device("cuda") == torch.device("cuda", 3)
    with pytest.raises(ValueError, match="there are 4 CUDA devices, but this process has the local rank 4: launch at"):
        resolve_device("cuda", local_rank=4)
    with pytest.raises(ValueError, match="device.id 'cuda:7' was asked for, but there are 4 CUDA devices"):
        resolve_device("cuda:7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each process sees its own
    assert resolve_device("cuda", local_rank=2) == torch.device("cuda", 0)


@pytest.mark.parametrize("name", ["mps", "xpu:1", "cuda"])
def test_a_device_that_is_missing_is_an_error(name: str) -> None:
    if torch.get_device_module(name.partition(":")[0]).is_available():
        pytest.skip("it is there")
    with pytest.raises(ValueError, match=f"device.id '{name}' was asked for, but PyTorch .* sees no .* device: set"):
        resolve_device(name)
    with pytest.raises(ValueError, match="device.id 'meta' is not a device of PyTorch"):
        resolve_device("meta")


def test_a_generator_takes_the_place_of_the_default_one() -> None:
    own, default = torch.Generator().manual_seed(5), default_generator(CPU)
    expected = torch.rand(4, generator=torch.Generator().manual_seed(5))
    before = default.get_state()
    with as_default_generator(own):
        drawn = torch.rand(2)
    assert torch.equal(default.get_state(), before)
    assert torch.equal(torch.cat([drawn, torch.rand(2, generator=own)]), expected)
    with as_default_generator(default):
        torch.rand(2)
    assert not torch.equal(default.get_state(), before)


def test_a_limit_is_a_part_of_the_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: limits.append(given))
    device = torch.device("cuda", 1)
    for limit in (0, 1 << 28, 1 << 31):
        limit_memory(device, limit)
    assert limits == [(0.25, device), (1.0, device)]

from __future__ import annotations

import numpy as np
import pytest
import torch

from ort_trainer.options.model_desc import ModelDescription
from ort_trainer.train.batch import Batch, check_batch, read_batch

DESC = ModelDescription(
    {
        "inputs": [("x", ["batch", 3]), ("y", ["batch"]), ("z", [2])],
        "outputs": [("loss", [], True)],
    }
)
X, Y, Z = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), torch.zeros(2)
CPU = torch.device("cpu")


def bind_batch(
    description: ModelDescription, args: tuple, kwargs: dict, device: torch.device, dtypes: dict | None = None
) -> Batch:
    batch = read_batch(description.input_names, args, kwargs)
    check_batch(description, batch, device, dtypes)
    return batch


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X, Y, Z), {}),
        ((), {"z": Z, "x": X, "y": Y}),
        ((X,), {"z": Z, "y": Y}),
        (([X, Y, Z],), {}),
        (((X, Y, Z),), {}),
        (({"y": Y, "x": X, "z": Z},), {}),
    ],
)
def test_ways_to_give_a_batch(args: tuple, kwargs: dict) -> None:
    batch = bind_batch(DESC, args, kwargs, CPU)
    assert list(batch) == ["x", "y", "z"]
    assert batch["x"].data_ptr() == X.data_ptr() and batch["y"].dtype == torch.int64


def test_arrays_and_strides() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    batch = bind_batch(DESC, (array.T, Y, torch.ones(4)[::2]), {}, CPU)
    assert torch.equal(batch["x"], torch.arange(12.0).reshape(3, 4).T)
    assert batch["x"].is_contiguous() and batch["z"].is_contiguous()
    reversed_array = bind_batch(DESC, (array.T[::-1], Y, Z), {}, CPU)["x"]
    assert torch.equal(reversed_array, torch.arange(12.0).reshape(3, 4).T.flip(0))
    swapped = bind_batch(DESC, (array.T.astype(">f4"), Y, Z), {}, CPU)["x"]
    assert torch.equal(swapped, batch["x"])
    read_only = np.zeros((4, 3), np.float32)
    read_only.flags.writeable = False
    assert bind_batch(DESC, (read_only, Y, Z), {}, CPU)["x"].shape == (4, 3)


def test_inputs_that_may_be_left_out() -> None:
    assert list(read_batch(DESC.input_names, (X,), {}, optional=["y", "z"])) == ["x"]


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((X, Y), {}, TypeError, r"inputs \['z'\] are missing"),
        ((X, Y, Z, Z), {}, TypeError, "4 inputs were given, but the model description has 3"),
        ((X, Y, Z), {"w": Z}, TypeError, r"unknown inputs \['w'\]"),
        ((X, Y, Z), {"x": X}, TypeError, r"inputs \['x'\] were given both by position and by name"),
        (([0.0], Y, Z), {}, TypeError, "input 'x' must be a torch.Tensor or a numpy array, but a list"),
        ((X.to_sparse(), Y, Z), {}, TypeError, r"must be an ordinary tensor.*to_dense\(\)"),
        ((X[0], Y, Z), {}, ValueError, "input 'x' has 1 dimensions.*says 2"),
        ((X[:, :2], Y, Z), {}, ValueError, "input 'x' has size 2 in dimension 1, but the model description says 3"),
        ((X[:3], Y, Z), {}, ValueError, "Mismatch in dynamic shape batch: it is 3 in input 'x' and 4 in input 'y'"),
        ((X.double(), Y, Z), {}, TypeError, r"dtype torch.float64, but training began with torch.float32: use"),
        ((X.to("meta"), Y, Z), {}, TypeError, "input 'x' must be an ordinary tensor.*on the device 'meta'"),
        ((np.ma.masked_array(X.numpy(), False), Y, Z), {}, TypeError, r"input 'x' is a masked array.*filled\(\)"),
    ],
)
def test_errors(args: tuple, kwargs: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bind_batch(DESC, args, kwargs, CPU, {"x": torch.float32})


def test_another_device() -> None:
    with pytest.raises(ValueError, match=r"input 'x' is on cpu, but training runs on meta: move it with .to\('meta'\)"):
        bind_batch(DESC, (X, Y, Z), {}, torch.device("meta"))


def test_tensors_that_move_are_read_where_they_were() -> None:
    """The device ``meta`` stands for a GPU, whose values nobody should ask for."""
    batch = Batch({"x": torch.tensor([3, 1, 2]), "z": torch.ones(2, device="meta")})
    batch.move(torch.device("meta"))
    assert {value.device.type for value in batch.values()} == {"meta"} and list(batch.on_host) == ["x"]
    assert batch.extremes("x", None) == (1, 3) and batch.array("x").tolist() == [3, 1, 2]

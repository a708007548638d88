"""Models that name files or call Python, wherever and in whichever encoding of protobuf they do."""

from __future__ import annotations

import random

import onnx
import onnx.parser
import pytest
from onnx import ModelProto

from ort_trainer.engine.contained import check_contained

from ..portable.onnx_encodings import Encoder, damaged, field, reaching_out

MODEL = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 18]> g (float[N,3] x) => (float[N,3] y) '
    "{ i = Constant <value = bool {1}> () "
    "y = If (i) <then_branch = t () => (float[N,3] d) { d = Neg(x) }, "
    "else_branch = e () => (float[N,3] d) { d = Abs(x) }> }"
)
MODEL.graph.node[0].attribute[0].t.data_location = onnx.TensorProto.DEFAULT
MODEL.metadata_props.add(key="location", value="a text that does not end the check at once")


@pytest.mark.parametrize("seed", range(20))
def test_sound_models_in_any_encoding(seed: int) -> None:
    data = Encoder(random.Random(seed)).message(MODEL)
    as_read = ModelProto.FromString(data)
    as_read.DiscardUnknownFields()
    assert as_read == MODEL
    check_contained(data, "the model")


def test_models_that_reach_out_in_any_encoding() -> None:
    encoder = Encoder(random.Random(0))
    for changed in reaching_out(MODEL):
        for data in (changed.SerializeToString(), encoder.message(changed)):
            with pytest.raises(ValueError, match="in another file|calls Python or opens other files"):
                check_contained(data, "the model")


def test_damaged_models() -> None:
    for data in damaged(MODEL.SerializeToString()):
        with pytest.raises(ValueError, match="the model is damaged or not an ONNX model: "):
            check_contained(data, "the model")


def test_the_last_text_is_read_and_only_texts() -> None:
    """A number in place of the domain hides no operator."""
    node = field(4, b"ATen") + field(7, b"org.pytorch.aten")
    for hiding in (b"\x3dabcd", b"\x39abcdefgh", b"\x38\x01", b"\x3b\x3c"):
        with pytest.raises(ValueError, match="operator ATen of domain 'org.pytorch.aten'"):
            check_contained(field(7, field(1, node + hiding)), "the model")

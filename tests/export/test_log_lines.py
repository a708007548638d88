"""The log of a first run: whole paths, descriptions as users write them, one line per export."""

from __future__ import annotations

import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ExportError, ORTTrainer, optim


class Fixing(nn.Module):
    """A GRU and its state; ``"auto"`` can't know that the state's first dimension is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 6, num_layers=2), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x, h)[0][-1])


def test_log_lines_of_a_first_run(caplog: pytest.LogCaptureFixture) -> None:
    model = Fixing()
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(), loss_fn=F.cross_entropy)
    with caplog.at_level(logging.INFO, logger="ort_trainer"):
        trainer.train_step(torch.randn(7, 2, 4), torch.zeros(2, 2, 6), torch.tensor([0, 1]))
        model.eval()
        trainer.eval_step(torch.randn(7, 2, 4), torch.zeros(2, 2, 6), torch.tensor([0, 1]))
        model.train()
        model.rnn.eval()
        trainer.train_step(torch.randn(7, 2, 4), torch.zeros(2, 2, 6), torch.tensor([0, 1]))
        with pytest.raises(ExportError):
            trainer.train_step(torch.randn(7, 2, 4), torch.zeros(3, 2, 6), torch.tensor([0, 1]))
    lines = [record.getMessage() for record in caplog.records]
    assert not [line for line in lines if "\n" in line or "Description(" in line or "((" in line]
    (derived,) = [line for line in lines if line.startswith("derived from")]
    assert derived.endswith("inputs x ['x_0', 2, 4], h ['h_0', 2, 6], label ['label_0']; outputs loss, output")
    exports = [line for line in lines if re.match(r"(exported|loaded) the", line)]
    assert len(exports) == 3  # training, evaluation, and training with the layer in evaluation mode
    fixes = [record for record in caplog.records if "fixes" in record.getMessage()]
    assert len(fixes) == 3 and all(record.levelno == logging.WARNING for record in fixes)
    found = re.fullmatch(
        r"the model fixes dimensions? ('\w+' at \d+(?:, )?)+: every other size needs its own export\. "
        r'File "(.+?)", line \d+, in \w+: .+',
        fixes[0].getMessage(),
    )
    assert found is not None and found[2] == __file__, "a line of the model, not of PyTorch"
    again = [line.removeprefix("exporting again: ") for line in lines if line.startswith("exporting again")]
    assert again == [
        "the model has changed: training: False -> True in the model, 'head'",
        "dimension 'h_0' is 3, and the model fixed it at 2",
    ]
    changed = [line for line in lines if line.startswith("the model has changed")]
    assert changed[-1] == "the model has changed: training: False -> True in the model, 'head'"

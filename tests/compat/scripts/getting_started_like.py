"""As the first example of onnxruntime.training was written in 2020: nothing in here knows of ort_trainer."""

import sys

import onnxruntime
import torch
from old_models import TOKENS, TransformerModel, token_batches, transformer_loss
from onnxruntime.training import ORTTrainer, ORTTrainerOptions, optim

onnxruntime.set_seed(1)
torch.manual_seed(1)
model = TransformerModel()
model_desc = {
    "inputs": [("input1", ["bptt", "batch"]), ("label", ["bptt_x_batch"])],
    "outputs": [("loss", [], True), ("predictions", ["bptt", "batch", TOKENS])],
}
opts = ORTTrainerOptions({"device": {"id": "cpu"}, "lr_scheduler": optim.lr_scheduler.LinearWarmupLRScheduler(20, 0.1)})
trainer = ORTTrainer(model, model_desc, optim.AdamConfig(lr=0.01), loss_fn=transformer_loss, options=opts)
for tokens in token_batches(8, 7, 3):
    loss, predictions = trainer.train_step(tokens[:-1], tokens[1:].reshape(-1))
    print("loss", loss.item())
loss, predictions = trainer.eval_step(tokens[:-1], tokens[1:].reshape(-1))
print("evaluated", loss.item())
torch.save(trainer.state_dict()["model"]["full_precision"], sys.argv[1])

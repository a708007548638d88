"""A Temporal Fusion Transformer of pytorch-forecasting, trained by Lightning on series made here."""

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet


class Losses(pl.Callback):
    """Collects the loss of each batch."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        self.losses.append(outputs["loss"].item())


def main(steps=20):
    pl.seed_everything(1, verbose=False)
    times = np.arange(120)
    rows = pd.concat(
        [
            pd.DataFrame({"time": times, "series": str(number), "value": np.sin(times / (3 + number)) + number})
            for number in range(5)
        ],
        ignore_index=True,
    )
    data = TimeSeriesDataSet(
        rows, "time", "value", ["series"], max_encoder_length=24, max_prediction_length=6,
        time_varying_unknown_reals=["value"], time_varying_known_reals=["time"], static_categoricals=["series"],
    )  # fmt: skip
    network = TemporalFusionTransformer.from_dataset(
        data, hidden_size=16, attention_head_size=2, hidden_continuous_size=8, dropout=0.0, learning_rate=1e-2,
        log_interval=-1, optimizer="adam",
    )  # fmt: skip
    collected = Losses()
    trainer = pl.Trainer(
        max_steps=steps, callbacks=collected, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(network, data.to_dataloader(batch_size=16, num_workers=0))
    torch.manual_seed(1)
    return collected.losses


if __name__ == "__main__":
    print(f"the loss is {main()[-1]:.3f}")

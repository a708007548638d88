"""A sentence encoder, with the losses and the trainer of sentence-transformers, on Python's documentation."""

import tempfile
from pydoc_data.topics import topics

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import AdaptiveLayerLoss, CoSENTLoss, MatryoshkaLoss, MultipleNegativesRankingLoss
from text_encoder import save_encoder

CASES = {
    "MultipleNegativesRankingLoss": MultipleNegativesRankingLoss,
    "MatryoshkaLoss": lambda model: MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), [64, 32, 16]),
    "AdaptiveLayerLoss": lambda model: AdaptiveLayerLoss(model, MultipleNegativesRankingLoss(model)),
    "CoSENTLoss": CoSENTLoss,
}


def main(steps=20, case="MultipleNegativesRankingLoss"):
    lines = [line.strip() for line in "\n".join(topics.values()).splitlines() if len(line.split()) > 7][:500]
    pairs = {"anchor": lines[:-1], "positive": lines[1:]}
    if case == "CoSENTLoss":
        pairs["score"] = [len(set(a) & set(b)) / len(set(a) | set(b)) for a, b in zip(*pairs.values(), strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        save_encoder(folder)
        model = SentenceTransformer(folder, device="cpu")
        loss = CASES[case](model)
        arguments = SentenceTransformerTrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=1e-3, logging_steps=1,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, dataloader_drop_last=True,
        )  # fmt: skip
        trainer = SentenceTransformerTrainer(model, arguments, Dataset.from_dict(pairs), loss=loss)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(f"the loss is {main()[-1]:.3f}")

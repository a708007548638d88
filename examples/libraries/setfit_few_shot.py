"""SetFit: a sentence encoder and a head that learn two topics of Python's documentation from few examples."""

import tempfile
from pydoc_data.topics import topics

from datasets import Dataset
from sentence_transformers import SentenceTransformer
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.linear_model import LogisticRegression
from text_encoder import save_encoder

TOPICS = ("assignment", "class")


def main(steps=20):
    rows = [
        (line, label) for label, topic in enumerate(TOPICS) for line in topics[topic].splitlines() if len(line) > 40
    ]
    texts, labels = zip(*rows, strict=True)
    with tempfile.TemporaryDirectory() as folder:
        save_encoder(folder)
        encoder = SentenceTransformer(folder, device="cpu")
        model = SetFitModel(encoder, LogisticRegression())
        arguments = TrainingArguments(
            folder, max_steps=steps, batch_size=8, logging_steps=1, report_to=[], save_strategy="no"
        )
        trainer = Trainer(model, arguments, Dataset.from_dict({"text": texts, "label": labels}))
        trainer.train()
    return [entry["embedding_loss"] for entry in trainer.st_trainer.state.log_history if "embedding_loss" in entry]

"""A T5 that learns to reverse numbers, with Seq2SeqTrainer and its evaluation by generate()."""

import tempfile

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

from ort_trainer.integrations.transformers import HuggingFaceTrainer

LENGTH = 6


class OrtSeq2SeqTrainer(HuggingFaceTrainer, Seq2SeqTrainer):
    pass


def rows(count, seed):
    """Returns numbers, as the tokens 2 to 11, and the same from behind; 1 ends both."""
    numbers = torch.randint(2, 12, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    end = torch.ones(count, 1, dtype=torch.int64)
    inputs, labels = torch.cat([numbers, end], 1), torch.cat([numbers.flip(1), end], 1)
    return [{"input_ids": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]


def accuracy(prediction):
    generated = prediction.predictions[:, 1 : LENGTH + 2]  # without the token that generation begins with
    return {"accuracy": (generated == prediction.label_ids[:, : LENGTH + 1]).all(axis=1).mean().item()}


def main(steps=300):
    torch.manual_seed(1)
    config = T5Config(
        vocab_size=12,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = Seq2SeqTrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            predict_with_generate=True,
            disable_tqdm=True,
        )
        trainer = OrtSeq2SeqTrainer(
            model, arguments, train_dataset=rows(2000, 0), eval_dataset=rows(64, 1), compute_metrics=accuracy
        )
        trainer.train()
        evaluated = trainer.evaluate()
    print(f"{evaluated['eval_accuracy']:.0%} of the numbers are reversed")
    return [*(entry["loss"] for entry in trainer.state.log_history if "loss" in entry), evaluated["eval_loss"]]


if __name__ == "__main__":
    main()

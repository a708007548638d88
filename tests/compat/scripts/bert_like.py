"""As the pre-training of a BERT was written in 2020: nothing in here knows of ort_trainer."""

import sys

import torch
from old_models import TOKENS, BertForPreTraining, bert_batches
from onnxruntime.capi.ort_trainer import IODescription, ModelDescription, ORTTrainer, load_checkpoint, save_checkpoint


def bert_model_description():
    names = ["input_ids", "segment_ids", "input_mask", "masked_lm_labels"]
    classes = [TOKENS, 2, 2, TOKENS]
    inputs = [
        IODescription(name, ["batch", "max_seq_len_in_batch"], torch.int64, num_classes=count)
        for name, count in zip(names, classes)
    ]
    inputs.append(IODescription("next_sentence_labels", ["batch"], torch.int64, num_classes=2))
    return ModelDescription(inputs, [IODescription("loss", [], torch.float32)])


def map_optimizer_attributes(name):
    no_decay = any(key in name for key in ["bias", "gamma", "beta", "LayerNorm"])
    return {"alpha": 0.9, "beta": 0.999, "lambda": 0.0 if no_decay else 0.01, "epsilon": 1e-6}


def get_lr(step):
    return 0.02 * (step / 2 if step < 2 else (1 - step / 10) ** 0.5)


torch.manual_seed(1)
model = ORTTrainer(
    BertForPreTraining(),
    None,
    bert_model_description(),
    "LambOptimizer",
    map_optimizer_attributes,
    IODescription("Learning_Rate", [1], torch.float32),
    torch.device("cpu"),
    gradient_accumulation_steps=2,
    use_mixed_precision=False,
    deepspeed_zero_stage=0,
    _opset_version=12,
)
model.train()
for number, batch in enumerate(bert_batches(8)):
    learning_rate = torch.tensor([get_lr(number // 2)])
    print("loss", model.train_step(*batch, learning_rate).item())
save_checkpoint(model, sys.argv[1], "bert", {"global_step": 4})
assert load_checkpoint(model, sys.argv[1], "bert") == {"global_step": 4}
state = model.state_dict()
print("norm", *[state[name].norm().item() for name in sorted(state) if name.startswith("model.cls.predictions.tr")])

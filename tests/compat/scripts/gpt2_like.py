"""As the fine-tuning of a GPT-2 was written in 2020: nothing in here knows of ort_trainer."""

import torch
from old_models import TOKENS, gpt2, token_batches
from onnxruntime.capi.ort_trainer import IODescription, LossScaler, ModelDescription, ORTTrainer


def gpt2_model_description():
    input_ids = IODescription("input_ids", ["batch", "max_seq_len_in_batch"], torch.int64, num_classes=TOKENS)
    labels = IODescription("labels", ["batch", "max_seq_len_in_batch"], torch.int64, num_classes=TOKENS)
    return ModelDescription([input_ids, labels], [IODescription("loss", [], torch.float32)])


def map_optimizer_attributes(name):
    no_decay = any(key in name for key in ["bias", "gamma", "beta", "LayerNorm", "ln_"])
    return {"alpha": 0.9, "beta": 0.999, "lambda": 0.0 if no_decay else 0.1, "epsilon": 1e-8}


def get_lr_this_step(global_step):
    return torch.tensor([0.01 * max(0.0, (10 - global_step) / 10)])


torch.manual_seed(1)
model = gpt2()
trainer = ORTTrainer(
    model,
    None,
    gpt2_model_description(),
    "AdamOptimizer",
    map_optimizer_attributes,
    IODescription("Learning_Rate", [1], torch.float32),
    torch.device("cpu"),
    gradient_accumulation_steps=2,
    world_rank=0,
    world_size=1,
    use_mixed_precision=False,
    allreduce_post_accumulation=True,
    get_lr_this_step=get_lr_this_step,
    loss_scaler=LossScaler("loss_scale_input_name", True, up_scale_window=2000),
    _opset_version=12,
)
trainer.train()
for tokens in token_batches(8, 3, 9):
    print("loss", trainer.train_step(tokens, tokens).item())

# Its weights go into a model of the library, which writes text and is saved.
other = gpt2()
other.load_state_dict(trainer.state_dict(), strict=False)
print("generated", *other.generate(tokens[:1, :4], max_new_tokens=6, do_sample=False, pad_token_id=0)[0].tolist())

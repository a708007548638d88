"""Models of transformers with random weights, in PyTorch's own loop."""

import torch
from sklearn.datasets import load_digits
from transformers import (
    CLIPConfig,
    CLIPModel,
    ViTConfig,
    ViTForImageClassification,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

LAYERS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "activation_dropout": 0.0}


def digits():
    """Returns images (samples, 3, 16, 16) and labels (samples,)."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return images.repeat_interleave(2, 2).repeat_interleave(2, 3).expand(-1, 3, -1, -1), torch.tensor(labels)


def vit():
    network = ViTForImageClassification(
        ViTConfig(**LAYERS, image_size=16, patch_size=4, num_labels=10, hidden_dropout_prob=0.0)
    )
    images, labels = digits()
    return network, lambda rows: {"pixel_values": images[rows], "labels": labels[rows]}


def clip():
    text = {**LAYERS, "vocab_size": 16, "max_position_embeddings": 4, "eos_token_id": 11, "bos_token_id": 10}
    network = CLIPModel(
        CLIPConfig(text_config=text, vision_config={**LAYERS, "image_size": 16, "patch_size": 4}, projection_dim=32)
    )
    images, labels = digits()
    captions = torch.stack([torch.full_like(labels, 10), labels, torch.full_like(labels, 11)], 1)
    return network, lambda rows: {"input_ids": captions[rows], "pixel_values": images[rows], "return_loss": True}


def tones(rows, samples):
    """Returns a tone (rows, samples) for each digit, and the digits."""
    labels = rows % 10
    return torch.sin(torch.arange(samples) * 0.05 * (1 + labels[:, None])), labels


def whisper():
    heads = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in
             {"layers": 2, "attention_heads": 4, "ffn_dim": 128}.items()}  # fmt: skip
    config = WhisperConfig(
        **heads, vocab_size=16, d_model=64, num_mel_bins=8, max_source_positions=25, max_target_positions=8,
        dropout=0.0, pad_token_id=12, bos_token_id=10, eos_token_id=11, decoder_start_token_id=10,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    network = WhisperForConditionalGeneration(config)

    def batch(rows):
        sound, labels = tones(rows, 400)
        return {"input_features": sound.view(len(rows), 8, 50), "labels": torch.stack([labels, labels * 0 + 11], 1)}

    return network, batch


def wav2vec2():
    config = Wav2Vec2Config(
        **LAYERS, **NO_DROPOUT, vocab_size=16, conv_dim=(32, 32), conv_stride=(5, 4), conv_kernel=(10, 8),
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, ctc_loss_reduction="mean", ctc_zero_infinity=True,
    )  # fmt: skip
    network = Wav2Vec2ForCTC(config)

    def batch(rows):
        sound, labels = tones(rows, 800)
        return {"input_values": sound, "labels": labels[:, None] + 1}

    return network, batch


CASES = {"CLIP": clip, "ViT": vit, "Whisper": whisper, "wav2vec2 with CTC": wav2vec2}


def main(steps=20, case="CLIP"):
    torch.manual_seed(1)
    model, batch = CASES[case]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        rows = torch.randint(1700, (16,), generator=torch.Generator().manual_seed(step))
        loss = model(**batch(rows)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for case in CASES:
        print(f"{case}: the loss is {main(case=case)[-1]:.3f}")

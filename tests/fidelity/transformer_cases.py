"""Small models of the transformers library, with random weights and without dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..helpers import TORCH
from .case import Batch, Case

VOCABULARY = 101
_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DECODER = {**_SMALL, "num_key_value_heads": 2}


def build(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Returns a function that makes a model with every kind of dropout set to 0."""

    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**settings)
        for key, value in vars(made).items():
            if isinstance(value, float) and ("drop" in key or key.endswith("_pdrop")):
                setattr(made, key, 0.0)
        built: nn.Module = getattr(transformers, model)(made)
        return built

    return make


def _tokens(draw: torch.Generator, batch: int, length: int) -> Batch:
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=draw)
    mask = torch.ones_like(ids)
    mask[0, length - 2 :] = 0  # a padded row
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


def classification(draw: torch.Generator, batch: int, length: int) -> Batch:
    return {**_tokens(draw, batch, length), "labels": torch.randint(0, 2, (batch,), generator=draw)}


def masked_language_model(draw: torch.Generator, batch: int, length: int) -> Batch:
    data = _tokens(draw, batch, length)
    chosen = torch.rand(batch, length, generator=draw) < 0.3
    chosen[:, 1] = True
    return {**data, "labels": data["input_ids"].masked_fill(~chosen, -100)}


def token_classification(draw: torch.Generator, batch: int, length: int) -> Batch:
    return {**_tokens(draw, batch, length), "labels": torch.randint(0, 2, (batch, length), generator=draw)}


def question_answering(draw: torch.Generator, batch: int, length: int) -> Batch:
    spans = {f"{end}_positions": torch.randint(0, length, (batch,), generator=draw) for end in ("start", "end")}
    return {**_tokens(draw, batch, length), **spans}


def causal_language_model(draw: torch.Generator, batch: int, length: int) -> Batch:
    data = _tokens(draw, batch, length)
    return {**data, "labels": data["input_ids"].masked_fill(data["attention_mask"] == 0, -100)}


def unmasked_language_model(draw: torch.Generator, batch: int, length: int) -> Batch:
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=draw)
    return {"input_ids": ids, "labels": ids}


def sequence_to_sequence(draw: torch.Generator, batch: int, length: int) -> Batch:
    return {**_tokens(draw, batch, length), "labels": torch.randint(3, VOCABULARY, (batch, length - 1), generator=draw)}


def image_classification(draw: torch.Generator, batch: int, length: int) -> Batch:
    image = torch.randn(batch, 3, 32, 32, generator=draw)
    return {"pixel_values": image, "labels": torch.randint(0, 2, (batch,), generator=draw)}


def large_image_classification(draw: torch.Generator, batch: int, length: int) -> Batch:
    """Makes images large enough for batch norm at the end of a network: over only three values it is chaotic."""
    image = torch.randn(batch, 3, 64, 64, generator=draw)
    return {"pixel_values": image, "labels": torch.randint(0, 2, (batch,), generator=draw)}


def speech_recognition(draw: torch.Generator, batch: int, length: int) -> Batch:
    features = torch.randn(batch, 16, 40, generator=draw)
    return {"input_features": features, "labels": torch.randint(3, VOCABULARY, (batch, length), generator=draw)}


def connectionist(draw: torch.Generator, batch: int, length: int) -> Batch:
    labels = torch.randint(3, VOCABULARY, (batch, length), generator=draw)
    labels[0, length - 2 :] = -100
    return {"input_values": torch.randn(batch, 800, generator=draw), "labels": labels}


def segmentation(draw: torch.Generator, batch: int, length: int) -> Batch:
    image = torch.randn(batch, 3, 64, 64, generator=draw)
    return {"pixel_values": image, "labels": torch.randint(0, 5, (batch, 64, 64), generator=draw)}


def _case(name: str, model: str, config: str, batch: Any, settings: dict[str, Any], exports: int = 1) -> Case:
    return Case(name, build(model, config, **settings), batch, exports=exports)


# Without a problem_type, the model inspects its labels and their values to derive it.
_DEBERTA = {
    **_SMALL, "problem_type": "single_label_classification",
    "relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"],
}  # fmt: skip
_GEMMA = {**_DECODER, "head_dim": 8}
_BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": 2,
}  # fmt: skip
_WHISPER = {
    **{k: v for k, v in _BART.items() if k != "max_position_embeddings"}, "num_mel_bins": 16,
    "max_source_positions": 20, "max_target_positions": 32, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip

_WAV2VEC2 = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 5),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False, "ctc_zero_infinity": True,
}  # fmt: skip

CASES = [
    _case("BERT, classification", "BertForSequenceClassification", "BertConfig", classification, _SMALL),
    _case("BERT, masked language model", "BertForMaskedLM", "BertConfig", masked_language_model, _SMALL),
    _case("BERT, question answering", "BertForQuestionAnswering", "BertConfig", question_answering, _SMALL),
    _case("BERT, token classification", "BertForTokenClassification", "BertConfig", token_classification, _SMALL),
    _case(
        "DistilBERT",
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        classification,
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "n_layers": 2,
            "n_heads": 4,
            "hidden_dim": 48,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
        },
    ),
    _case("RoBERTa", "RobertaForSequenceClassification", "RobertaConfig", classification, _SMALL),
    _case(
        "ELECTRA", "ElectraForSequenceClassification", "ElectraConfig", classification, {**_SMALL, "embedding_size": 16}
    ),
    _case(
        "ALBERT", "AlbertForSequenceClassification", "AlbertConfig", classification, {**_SMALL, "embedding_size": 16}
    ),
    _case("DeBERTa-v2", "DebertaV2ForSequenceClassification", "DebertaV2Config", classification, _DEBERTA),
    _case(
        "XLNet",
        "XLNetForSequenceClassification",
        "XLNetConfig",
        classification,
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
        exports=4 if TORCH >= (2, 14) else 1,  # its capture fixes the sizes of an einsum's views
    ),
    _case("MPNet", "MPNetForSequenceClassification", "MPNetConfig", classification, _SMALL),
    _case(
        "ModernBERT",
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        classification,
        {**_SMALL, "cls_token_id": 1, "sep_token_id": 2},
    ),
    _case(
        "GPT-2",
        "GPT2LMHeadModel",
        "GPT2Config",
        causal_language_model,
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    _case(
        "OPT",
        "OPTForCausalLM",
        "OPTConfig",
        causal_language_model,
        {**{k: v for k, v in _SMALL.items() if k != "intermediate_size"}, "ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    _case("GPT-NeoX", "GPTNeoXForCausalLM", "GPTNeoXConfig", causal_language_model, _SMALL),
    _case(
        "BLOOM",
        "BloomForCausalLM",
        "BloomConfig",
        causal_language_model,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    _case("Llama", "LlamaForCausalLM", "LlamaConfig", causal_language_model, _DECODER),
    _case("Qwen2", "Qwen2ForCausalLM", "Qwen2Config", causal_language_model, _DECODER),
    _case("Qwen3", "Qwen3ForCausalLM", "Qwen3Config", causal_language_model, _GEMMA),
    _case(
        "Mistral, sliding window",
        "MistralForCausalLM",
        "MistralConfig",
        causal_language_model,
        {**_DECODER, "sliding_window": 4},
    ),
    _case(
        "Mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        causal_language_model,
        {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    _case(
        "Mamba",
        "MambaForCausalLM",
        "MambaConfig",
        unmasked_language_model,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "use_cache": False},
    ),
    _case("Gemma", "GemmaForCausalLM", "GemmaConfig", causal_language_model, _GEMMA),
    _case("Gemma 2", "Gemma2ForCausalLM", "Gemma2Config", causal_language_model, {**_GEMMA, "sliding_window": 4}),
    _case("Phi", "PhiForCausalLM", "PhiConfig", causal_language_model, _SMALL),
    _case("T5", "T5ForConditionalGeneration", "T5Config", sequence_to_sequence, _T5),
    _case("BART", "BartForConditionalGeneration", "BartConfig", sequence_to_sequence, _BART),
    _case(
        "ViT",
        "ViTForImageClassification",
        "ViTConfig",
        image_classification,
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": 32,
            "patch_size": 8,
        },
    ),
    _case(
        "ConvNeXt",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        image_classification,
        {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "num_stages": 4, "image_size": 32},
    ),
    _case(
        "ResNet",
        "ResNetForImageClassification",
        "ResNetConfig",
        large_image_classification,
        {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
    ),
    _case(
        "Swin",
        "SwinForImageClassification",
        "SwinConfig",
        image_classification,
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    ),
    _case(
        "SegFormer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        segmentation,
        {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 32, "num_labels": 5},
    ),
    _case("Wav2Vec2", "Wav2Vec2ForCTC", "Wav2Vec2Config", connectionist, _WAV2VEC2),
    _case("Whisper", "WhisperForConditionalGeneration", "WhisperConfig", speech_recognition, _WHISPER),
]

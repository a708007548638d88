"""The models of the scripts, as their examples had them in files of their own, and their batches."""

import math

import torch
from torch import nn

TOKENS = 40


class TransformerModel(nn.Module):
    def __init__(self):
        super(TransformerModel, self).__init__()
        self.src_mask = None
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0)
        self.transformer_encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.encoder = nn.Embedding(TOKENS, 16)
        self.decoder = nn.Linear(16, TOKENS)

    def forward(self, input1):
        if self.src_mask is None or self.src_mask.size(0) != input1.size(0):
            mask = (torch.triu(torch.ones(input1.size(0), input1.size(0))) == 1).transpose(0, 1)
            self.src_mask = mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)
        output = self.transformer_encoder(self.encoder(input1) * math.sqrt(16), self.src_mask)
        return self.decoder(output)


def transformer_loss(output, target):
    return nn.functional.cross_entropy(output.view(-1, TOKENS), target)


class BertForPreTraining(nn.Module):
    """Both losses in one, with the order of arguments of the BERT that DeepLearningExamples had."""

    def __init__(self):
        super(BertForPreTraining, self).__init__()
        from transformers import BertConfig
        from transformers import BertForPreTraining as Model

        config = BertConfig(
            vocab_size=TOKENS,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.model = Model(config)

    def forward(self, input_ids, token_type_ids, attention_mask, masked_lm_labels, next_sentence_labels):
        found = self.model(
            input_ids, attention_mask, token_type_ids, labels=masked_lm_labels, next_sentence_label=next_sentence_labels
        )
        return found.loss


def bert_batches(count):
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        ids = torch.randint(1, TOKENS, (4, 10), generator=generator)
        masked = torch.rand(4, 10, generator=generator) < 0.3
        masked[:, 0] = True
        lengths = torch.randint(5, 11, (4, 1), generator=generator)
        mask = (torch.arange(10) < lengths).long()
        segments = (torch.arange(10) >= 4).long().expand(4, 10).contiguous()
        yield ids, segments, mask, ids.masked_fill(~masked, -100), torch.randint(0, 2, (4,), generator=generator)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=TOKENS,
            n_positions=16,
            n_embd=16,
            n_layer=1,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def token_batches(count, *shape):
    generator = torch.Generator().manual_seed(2)
    for _ in range(count):
        yield torch.randint(0, TOKENS, shape, generator=generator)

"""A GPT of characters: decay groups, a schedule by hand, gradient accumulation, clipping, samples between steps."""

import math

import torch
import torch.nn.functional as F
from cookbook_data import characters
from torch import nn

BLOCK, WIDTH, HEADS, VOCABULARY = 32, 32, 2, 128
MAX_LR, MIN_LR, WARMUP, DECAY = 3e-3, 3e-4, 10, 300
ACCUMULATION, BATCH = 2, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (part.view(B, T, HEADS, C // HEADS).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1]]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self):
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=MAX_LR, betas=(0.9, 0.95))

    @torch.no_grad()
    def generate(self, idx, count):
        for _ in range(count):
            logits, _ = self(idx[:, -BLOCK:])
            idx = torch.cat((idx, logits[:, -1].argmax(1, keepdim=True)), dim=1)
        return idx


def get_lr(it):
    if it < WARMUP:
        return MAX_LR * (it + 1) / (WARMUP + 1)
    ratio = min(1.0, (it - WARMUP) / (DECAY - WARMUP))
    return MIN_LR + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (MAX_LR - MIN_LR)


def get_batch(data, generator):
    starts = torch.randint(len(data) - BLOCK, (BATCH,), generator=generator)
    rows = starts.unsqueeze(1) + torch.arange(BLOCK)
    return data[rows], data[rows + 1]


def main(steps=300):
    torch.manual_seed(1)
    data, generator = characters(), torch.Generator().manual_seed(1)
    model = GPT()
    optimizer = model.configure_optimizers()
    losses = []
    for it in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(it)
        for _ in range(ACCUMULATION):
            X, Y = get_batch(data, generator)
            _, loss = model(X, Y)
            (loss / ACCUMULATION).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if it % 100 == 99 or it == 4:
            model.eval()
            print(it, repr("".join(map(chr, model.generate(data[None, :8], 60)[0].tolist()))))
            model.train()
    return losses


if __name__ == "__main__":
    main()

"""A GPT written out, and its training script: compiled, bf16 or fp16, micro-steps, clipping, a rate by hand."""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class Config:
    block_size: int = 64
    vocab_size: int = 256
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 64
    dropout: float = 0.1


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.n_head
        self.attend = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.project = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.dropout = config.dropout

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.attend(x).split(c, dim=2))
        dropped = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=True)
        return self.project(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attention = Attention(config)
        wide = 4 * config.n_embd
        self.mlp = nn.Sequential(nn.Linear(config.n_embd, wide), nn.GELU(), nn.Linear(wide, config.n_embd))

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.tokens.weight = self.head.weight
        self.apply(self.init)
        for name, parameter in self.named_parameters():
            if name.endswith("project.weight"):
                torch.nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))
        print(f"parameters: {sum(p.numel() for p in self.parameters()) / 1e6:.2f}M")

    def init(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def optimizers(self, decay, rate, device_type):
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device_type == "cuda")


batch_size, accumulation, grad_clip = 4, 2, 1.0
device = "cuda"
device_type = "cuda" if "cuda" in device else "cpu"
dtype = "bfloat16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "float16"
torch.backends.cuda.matmul.allow_tf32 = True
ptdtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=ptdtype)
model = GPT(Config())
model.to(device)
scaler = torch.cuda.amp.GradScaler(enabled=(dtype == "float16"))
optimizer = model.optimizers(0.1, 6e-4, device_type)
model = torch.compile(model)
data = torch.randint(0, 256, (4096,))


def get_batch():
    starts = torch.randint(len(data) - 64, (batch_size,))
    x = torch.stack([data[i : i + 64] for i in starts])
    y = torch.stack([data[i + 1 : i + 65] for i in starts])
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


def rate(done, warm_up=100, total=1000):
    return 6e-4 * (done + 1) / warm_up if done < warm_up else 3e-4 * (1 + math.cos(math.pi * done / total))


def step():
    for group in optimizer.param_groups:
        group["lr"] = rate(0)
    x, y = get_batch()
    for _ in range(accumulation):
        with ctx:
            _, loss = model(x, y)
            loss = loss / accumulation
        x, y = get_batch()
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"loss {loss.item() * accumulation:.4f}")

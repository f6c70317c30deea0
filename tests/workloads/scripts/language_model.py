"""Causal language modelling with a small GPT-2 in a plain loop: autocast, scaler, accumulation, schedule."""

import math

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

BATCH, BLOCK, ACCUMULATION = 2, 64, 2


def train():
    torch.manual_seed(42)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=500, n_positions=128)
    model = GPT2LMHeadModel(config)
    model.to("cuda")
    no_decay = ["bias", "ln_1.weight", "ln_2.weight"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if not any(x in n for x in no_decay)], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if any(x in n for x in no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-5)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=10, num_training_steps=100)
    scaler = torch.amp.GradScaler("cuda")
    tokens = torch.randint(0, 500, (ACCUMULATION, BATCH, BLOCK))

    def step():
        model.train()
        total = 0.0
        for batch in tokens:
            batch = batch.to("cuda", non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(input_ids=batch, labels=batch).loss / ACCUMULATION
            scaler.scale(loss).backward()
            total += loss.detach().float()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        perplexity = math.exp(min(total.item(), 20))
        print(f"loss {total:.3f} perplexity {perplexity:.2f} lr {scheduler.get_last_lr()[0]:.2e}")

    return step

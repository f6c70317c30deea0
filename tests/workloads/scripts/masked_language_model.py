"""Masked language modelling with RoBERTa: the batch is masked on the fly, in bf16 under autocast."""

import torch
from transformers import RobertaConfig, RobertaForMaskedLM

config = RobertaConfig(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=2, vocab_size=500, pad_token_id=1
)
model = RobertaForMaskedLM(config).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / 1000))
sentences = torch.randint(5, 500, (4, 64))


def mask_tokens(inputs, mask_token=4, probability=0.15):
    labels = inputs.clone()
    masked = torch.bernoulli(torch.full(labels.shape, probability)).bool()
    labels[~masked] = -100
    replaced = torch.bernoulli(torch.full(labels.shape, 0.8)).bool() & masked
    inputs[replaced] = mask_token
    return inputs, labels


def step():
    inputs, labels = mask_tokens(sentences.clone())
    inputs, labels = inputs.cuda(non_blocking=True), labels.cuda(non_blocking=True)
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
        loss = model(inputs, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    print("loss", round(loss.item(), 3))

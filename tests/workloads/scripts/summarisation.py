"""Summaries with T5 and Adafactor; labels of padding are ignored."""

import torch
from transformers import T5Config, T5ForConditionalGeneration
from transformers.optimization import Adafactor


def build(batch=2, source=64, target=16):
    config = T5Config(
        d_model=64, d_ff=128, d_kv=16, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=500,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).cuda()
    model.train()
    optimizer = Adafactor(model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False)
    articles = torch.randint(0, 500, (batch, source), device="cuda")
    mask = torch.ones_like(articles)
    summaries = torch.randint(0, 500, (batch, target), device="cuda")

    def training_step():
        labels = summaries.masked_fill(summaries == 0, -100)
        loss = model(input_ids=articles, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return training_step

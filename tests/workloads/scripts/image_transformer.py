"""A vision transformer of transformers', with mixup, label smoothing and gradient checkpoints."""

import random

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

CLASSES = 10


class Trainer:
    def __init__(self, batch=4):
        self.device = "cuda"
        config = ViTConfig(
            hidden_size=64, intermediate_size=128, num_attention_heads=4, num_hidden_layers=3, image_size=32,
            patch_size=8, num_labels=CLASSES,
        )  # fmt: skip
        self.model = ViTForImageClassification(config).to(self.device)
        self.model.gradient_checkpointing_enable()
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=100)
        self.images = torch.rand(batch, 3, 32, 32)
        self.labels = torch.randint(0, CLASSES, (batch,))

    def train_step(self):
        self.model.train()
        images = self.images.to(self.device, memory_format=torch.channels_last)
        labels = self.labels.to(self.device)
        share = random.betavariate(0.2, 0.2)
        images = images.mul(share).add_(images.roll(1, 0), alpha=1 - share)
        logits = self.model(pixel_values=images).logits
        loss = share * self.criterion(logits, labels) + (1 - share) * self.criterion(logits, labels.roll(1, 0))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        if torch.isnan(loss):
            raise SystemExit("diverged")


def main():
    return Trainer().train_step

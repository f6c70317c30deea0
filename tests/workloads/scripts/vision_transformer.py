"""torchvision's ViT with mixed precision, clipping of values and a decay that norms and biases are spared."""

import torch
from torchvision.models import VisionTransformer


def split_by_decay(model, decay):
    norms, others = [], []
    for parameter in model.parameters():
        (norms if parameter.ndim < 2 else others).append(parameter)
    return [{"params": others, "weight_decay": decay}, {"params": norms, "weight_decay": 0.0}]


class Loop:
    def __init__(self, device):
        self.device = device
        self.model = VisionTransformer(
            image_size=32, patch_size=8, num_layers=3, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10
        ).to(device)
        self.optimizer = torch.optim.AdamW(split_by_decay(self.model, 0.3), lr=3e-3)
        self.scaler = torch.amp.GradScaler(device)
        self.steps = 0

    def __call__(self):
        image = torch.rand(4, 3, 32, 32, device=self.device)
        target = torch.rand(4, 10, device=self.device).softmax(-1)
        with torch.amp.autocast(self.device, dtype=torch.float16):
            loss = torch.nn.functional.cross_entropy(self.model(image), target)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_value_(self.model.parameters(), 1.0)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            self.steps += 1
        return loss.detach()


def main():
    return Loop("cuda")

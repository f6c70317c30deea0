"""Segmentation with DeepLab: two heads, pixels to ignore, a polynomial schedule, and a matrix of confusion."""

import torch
from torch import nn
from torchvision.models.segmentation import deeplabv3_resnet50

CLASSES = 5


def criterion(outputs, target):
    losses = {name: nn.functional.cross_entropy(x, target, ignore_index=255) for name, x in outputs.items()}
    return losses["out"] + 0.5 * losses["aux"]


class Confusion:
    def __init__(self):
        self.counts = torch.zeros(CLASSES, CLASSES, dtype=torch.int64, device="cuda")

    def update(self, target, predicted):
        with torch.no_grad():
            known = (target >= 0) & (target < CLASSES)
            index = CLASSES * torch.where(known, target, 0) + predicted
            self.counts += (
                torch.zeros_like(self.counts.flatten())
                .scatter_add_(0, index.flatten(), known.flatten().long())
                .reshape(CLASSES, CLASSES)
            )


def main():
    model = deeplabv3_resnet50(weights=None, weights_backbone=None, aux_loss=True, num_classes=CLASSES).cuda()
    groups = [
        {"params": [p for p in model.backbone.parameters() if p.requires_grad]},
        {"params": [p for p in model.classifier.parameters() if p.requires_grad]},
        {"params": [p for p in model.aux_classifier.parameters() if p.requires_grad], "lr": 0.1},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=100, power=0.9)
    scaler = torch.cuda.amp.GradScaler()
    matrix = Confusion()
    image = torch.rand(2, 3, 64, 64)
    target = torch.randint(0, CLASSES, (2, 64, 64))

    def step():
        x, y = image.to("cuda"), target.to("cuda")
        with torch.cuda.amp.autocast():
            output = model(x)
            loss = criterion(output, y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        matrix.update(y, output["out"].argmax(1))
        print("loss", loss.item(), "lr", optimizer.param_groups[0]["lr"])

    return step

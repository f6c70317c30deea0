"""Detection with Faster R-CNN: a list of images of several sizes, a dict of losses, and a check of the loss."""

import math
import sys

import torch
from torchvision.models.detection import fasterrcnn_resnet50_fpn


def main():
    model = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=5, min_size=128, max_size=160)
    model.cuda().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.02, momentum=0.9)
    images = [torch.rand(3, 128, 128), torch.rand(3, 128, 144)]
    corners = torch.tensor([[10.0, 10.0, 60.0, 60.0], [20.0, 30.0, 100.0, 90.0]])
    targets = [{"boxes": corners.clone(), "labels": torch.tensor([1, 2])} for _ in images]

    def step():
        pictures = [image.to("cuda") for image in images]
        wanted = [{key: value.to("cuda") for key, value in target.items()} for target in targets]
        losses = model(pictures, wanted)
        loss = sum(losses.values())
        if not math.isfinite(loss.item()):
            print(f"loss is {loss}, stopping")
            sys.exit(1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step

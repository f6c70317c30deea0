"""ResNet on images, as a reference script trains it: channels last, scaler, momentum, accuracy at 1 and 5."""

import torch
import torchvision
from torch import nn


def accuracy(output, target, topk=(1,)):
    with torch.inference_mode():
        _, predicted = output.topk(max(topk), 1)
        correct = predicted.t().eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / target.size(0)) for k in topk]


def main(batch=4):
    device = torch.device("cuda")
    torch.backends.cudnn.benchmark = True
    model = torchvision.models.resnet18(weights=None, num_classes=20)
    model = model.to(device, memory_format=torch.channels_last)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    scaler = torch.amp.GradScaler("cuda")
    loader = [(torch.randn(batch, 3, 64, 64), torch.randint(0, 20, (batch,)))]

    def train_one_batch():
        model.train()
        for image, target in loader:
            image, target = image.to(device, non_blocking=True), target.to(device, non_blocking=True)
            with torch.amp.autocast("cuda", enabled=scaler is not None):
                output = model(image)
                loss = criterion(output, target)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            first, fifth = accuracy(output, target, topk=(1, 5))
            print(f"loss {loss.item():.3f} acc@1 {first.item():.2f} acc@5 {fifth.item():.2f}")
        scheduler.step()

    return train_one_batch

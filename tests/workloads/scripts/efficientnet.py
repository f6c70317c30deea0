"""timm's EfficientNet with RMSprop, dropped paths, random erasing on the GPU, and a moving average in a deep copy."""

import copy

import timm
import torch
import torch.nn as nn


class Ema:
    def __init__(self, model, decay=0.9999):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            if mine.is_floating_point():
                mine.mul_(self.decay).add_(theirs, alpha=1 - self.decay)
            else:
                mine.copy_(theirs)


model = timm.create_model("efficientnet_b0", drop_path_rate=0.2, drop_rate=0.2, num_classes=10).cuda()
ema = Ema(model)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.05, momentum=0.9, eps=1e-3)
criterion = nn.CrossEntropyLoss().cuda()


def erased(images):
    for image in images:
        image[:, 8:24, 8:24] = torch.empty_like(image[:, 8:24, 8:24]).normal_()
    return images


def step(batch=2):
    x = erased(torch.randn(batch, 3, 64, 64, device="cuda"))
    y = torch.randint(10, (batch,), device="cuda")
    output = model(x)
    loss = criterion(output, y)
    model.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    ema.update(model)
    top = (output.argmax(1) == y).float().mean()
    print(f"loss {loss.item():.3f} top-1 {100 * top:.2f}")

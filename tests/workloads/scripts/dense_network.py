"""DenseNet with its own checkpoints, an average of weights and a warm-up before a cosine."""

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision.models import densenet121

model = densenet121(memory_efficient=True, num_classes=10).cuda()
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9, alpha=0.9)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=95)
schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[5])
images, labels = torch.randn(2, 3, 64, 64).cuda(), torch.randint(0, 10, (2,)).cuda()


def step():
    optimizer.zero_grad(set_to_none=True)
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    average.update_parameters(model)
    schedule.step()
    return float(loss)

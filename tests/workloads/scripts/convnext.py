"""timm's ConvNeXt with stochastic depth, layer-wise rates, LAMB and a moving average, as its training script does."""

import time
from collections import OrderedDict

import timm
import torch
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import AverageMeter, ModelEmaV3, NativeScaler


def main():
    device = torch.device("cuda:0")
    model = timm.create_model("convnext_atto", num_classes=10, drop_path_rate=0.1)
    model.to(device=device, memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(model, opt="lamb", lr=1e-3, weight_decay=0.05)
    average = ModelEmaV3(model, decay=0.9998)
    loss_fn, scaler = SoftTargetCrossEntropy().to(device), NativeScaler()
    losses, batch_time = AverageMeter(), AverageMeter()
    updates = 0

    def train_batch():
        nonlocal updates
        began = time.time()
        x = torch.randn(4, 3, 64, 64).to(device).contiguous(memory_format=torch.channels_last)
        y = torch.rand(4, 10).to(device).softmax(1)
        with torch.autocast(device_type=device.type, dtype=torch.float16):
            loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        scaler(loss, optimizer, clip_grad=1.0, clip_mode="norm", parameters=model.parameters(), create_graph=False)
        updates += 1
        average.update(model, step=updates)
        torch.cuda.synchronize()
        losses.update(loss.item(), x.size(0))
        batch_time.update(time.time() - began)
        print(OrderedDict(loss=losses.avg, rate=x.size(0) / max(batch_time.val, 1e-9)))

    return train_batch

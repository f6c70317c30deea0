"""Training scripts of several networks, losses and averages: PyTorch's peak to the byte, and all its FLOPs."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from sim import load_profile, simulate  # noqa: E402
from sim.analysis.peak_memory import home_peak  # noqa: E402
from sim.measure.tracked import Tracked  # noqa: E402
from workloads.capture import capture_from_reference  # noqa: E402
from workloads.capturing import asked, cuda_calls, making, sums  # noqa: E402

HEAD = """
import contextlib
import copy
import torch
from torch import nn
import torch.nn.functional as F
"""

VAE = """
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(784, 40), nn.Linear(40, 20), nn.Linear(40, 20)
        self.fc3, self.fc4 = nn.Linear(20, 40), nn.Linear(40, 784)
    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 784)))
        mu, logvar = self.fc21(h), self.fc22(h)
        std = torch.exp(0.5 * logvar)
        z = mu + torch.randn_like(std) * std
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar

model = VAE().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
train_loss = 0
def step(batch=32):
    global train_loss
    data = torch.rand(batch, 1, 28, 28, device="cuda")
    optimizer.zero_grad()
    recon, mu, logvar = model(data)
    bce = F.binary_cross_entropy(recon, data.view(-1, 784), reduction="sum")
    loss = bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    loss.backward()
    train_loss += loss.item()
    optimizer.step()
"""

SIAMESE = """
base = nn.Sequential(nn.Conv2d(1, 16, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 13 * 13, 64)).cuda()
head = nn.Sequential(nn.Linear(128, 64), nn.ReLU(inplace=True), nn.Linear(64, 1), nn.Sigmoid()).cuda()
optimizer = torch.optim.Adadelta([*base.parameters(), *head.parameters()], lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
def step(batch=16):
    one, other = (torch.rand(batch, 1, 28, 28, device="cuda") for _ in range(2))
    targets = torch.randint(2, (batch,), device="cuda").float()
    optimizer.zero_grad()
    outputs = head(torch.cat((base(one), base(other)), 1)).squeeze()
    loss = nn.BCELoss()(outputs, targets)
    loss.backward()
    optimizer.step()
    correct = torch.where(outputs > 0.5, 1, 0).eq(targets.long()).sum().item()
    scheduler.step()
"""

STYLE = """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.pad, self.relu, self.norm = nn.ReflectionPad2d(1), nn.ReLU(), nn.InstanceNorm2d(width, affine=True)
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3), nn.Conv2d(width, width, 3)
    def forward(self, x):
        return self.norm(self.conv2(self.pad(self.relu(self.norm(self.conv1(self.pad(x))))))) + x

transformer = nn.Sequential(
    nn.Conv2d(3, 16, 9, 2, 4), Block(16), Block(16), nn.Upsample(scale_factor=2), nn.Conv2d(16, 3, 9, 1, 4)
).cuda()
vgg = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)).cuda().requires_grad_(False)
optimizer, mse = torch.optim.Adam(transformer.parameters(), 1e-3), nn.MSELoss()
def gram(y):
    b, c, h, w = y.size()
    features = y.view(b, c, h * w)
    return features.bmm(features.transpose(1, 2)) / (c * h * w)
style = gram(vgg(torch.rand(1, 3, 32, 32, device="cuda")))
def step(batch=2):
    optimizer.zero_grad()
    x = torch.rand(batch, 3, 32, 32, device="cuda") * 255
    y = transformer(x)
    features_y, features_x = vgg(y), vgg(x)
    loss = 1e5 * mse(features_y, features_x) + 1e10 * mse(gram(features_y), style.expand(batch, -1, -1))
    loss.backward()
    optimizer.step()
    total = loss.item()
"""

PREFERENCE = """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
        self.embedding, self.body, self.head = nn.Embedding(50, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 50)
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), device=x.device)
        return self.head(self.body(self.embedding(x), mask=mask, is_causal=True))

policy = LM().cuda()
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)
def log_p(model, x):
    return model(x)[:, :-1].log_softmax(-1).gather(2, x[:, 1:, None]).squeeze(2).sum(1)
def step(batch=2, sequence=16):
    x = torch.cat([torch.randint(50, (batch, sequence), device="cuda") for _ in range(2)])
    ours = log_p(policy, x)
    with torch.no_grad():
        theirs = log_p(reference, x)
    margin = ours - theirs
    loss = -F.logsigmoid(0.1 * (margin[:batch] - margin[batch:])).mean()
    accuracy = (margin[:batch] > margin[batch:]).float().mean().item()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""

ACCUMULATED = """
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]).cuda()
model = torch.compile(model)
average = copy.deepcopy(model).requires_grad_(False)
optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cuda")
no_sync = getattr(model, "no_sync", contextlib.nullcontext)
def step(batch=16):
    for i in range(4):
        with no_sync() if i < 3 else contextlib.nullcontext(), torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.rand(batch, 64, device="cuda")).square().mean() / 4
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), model.parameters()):
            mine.lerp_(theirs, 0.001)
"""

DIFFUSION = """
class Block(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.norm, self.conv, self.time = nn.GroupNorm(4, i), nn.Conv2d(i, o, 3, padding=1), nn.Linear(32, o)
        self.short = nn.Conv2d(i, o, 1) if i != o else nn.Identity()
    def forward(self, x, t):
        return self.short(x) + self.conv(F.silu(self.norm(x))) + self.time(F.silu(t))[:, :, None, None]

class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.conv_in, self.conv_out = nn.Embedding(1000, 32), nn.Conv2d(3, 16, 3), nn.Conv2d(16, 3, 1)
        self.down = nn.ModuleList([Block(16, 16), Block(16, 32)])
        self.up = nn.ModuleList([Block(64, 16), Block(32, 16)])
    def forward(self, x, t):
        t, x, skips = self.time(t), self.conv_in(F.pad(x, (1, 1, 1, 1))), []
        for block in self.down:
            x = block(x, t)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], 1), t)
        return self.conv_out(x)

unet = UNet().cuda()
average = torch.optim.swa_utils.AveragedModel(unet, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
kept = torch.linspace(0.99, 0.01, 1000, device="cuda").cumprod(0)
def step(batch=4):
    images = torch.randn(batch, 3, 16, 16, device="cuda")
    noise, steps = torch.randn_like(images), torch.randint(0, 1000, (batch,), device="cuda").long()
    share = kept[steps].view(-1, 1, 1, 1)
    noisy = share.sqrt() * images + (1 - share).sqrt() * noise
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = F.mse_loss(unet(noisy, steps).float(), noise)
    loss.backward()
    nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(unet)
    logged = {"loss": loss.detach().item()}
"""

Q_LEARNING = """
class Q(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1, self.layer2, self.layer3 = nn.Linear(4, 32), nn.Linear(32, 32), nn.Linear(32, 2)
    def forward(self, x):
        return self.layer3(F.relu(self.layer2(F.relu(self.layer1(x)))))

policy, target = Q().cuda(), Q().cuda()
target.load_state_dict(policy.state_dict())
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4, amsgrad=True)
def step(batch=32):
    state, following, reward = (torch.rand(batch, n, device="cuda") for n in (4, 4, 1))
    value = policy(state).gather(1, torch.randint(2, (batch, 1), device="cuda"))
    with torch.no_grad():
        expected = target(following).max(1).values.unsqueeze(1) * 0.99 + reward
    loss = nn.SmoothL1Loss()(value, expected)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(policy.parameters(), 100)
    optimizer.step()
"""

RELABELLED = """
class Real(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 2048), nn.LeakyReLU(0.2, True), nn.Linear(2048, 1), nn.Sigmoid())
    def forward(self, x):
        return super().forward(x).squeeze(1)

fakes, judge = nn.Sequential(nn.Linear(8, 64), nn.Tanh()).cuda(), Real().cuda()
optimizers = [torch.optim.Adam(model.parameters(), betas=(0.5, 0.999)) for model in (judge, fakes)]
def step(batch=16):
    judge.zero_grad()
    label = torch.full((batch,), 1.0, device="cuda")
    F.binary_cross_entropy(judge(torch.rand(batch, 64, device="cuda")), label).backward()
    fake = fakes(torch.randn(batch, 8, device="cuda"))
    label.fill_(0.0)
    F.binary_cross_entropy(judge(fake.detach()), label).backward()
    optimizers[0].step()
    judge.zero_grad()
    fakes.zero_grad()
    label.fill_(1.0)
    F.binary_cross_entropy(judge(fake), label).backward()
    optimizers[1].step()
"""

FROM_ARRAYS = """
import numpy as np
data = np.arange(4000) % 50
model = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(16 * 64, 50)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
def get_batch(batch):
    ix = torch.randint(len(data) - 64, (batch,))
    x = torch.stack([torch.from_numpy(data[i : i + 64].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 64 : i + 65].astype(np.int64)) for i in ix])
    return x.pin_memory().to("cuda", non_blocking=True), y.pin_memory().to("cuda", non_blocking=True)
x, y = get_batch(8)
def step():
    global x, y
    for micro_step in range(3):
        loss = F.cross_entropy(model(x), y[:, 0]) / 3
        x, y = get_batch(8)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""

SPLIT_NODES = """
class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 5)
    def forward(self, x, edges):
        row, col = edges
        x = torch.zeros(x.size(0), 32, device=x.device).index_add_(0, col, F.relu(self.first(x))[row])
        return F.log_softmax(self.second(F.dropout(x, training=self.training)), 1)

nodes, edges = torch.rand(200, 16).cuda(), torch.randint(200, (2, 800), device="cuda")
classes = torch.randint(0, 5, (200,)).to("cuda")
train_mask = torch.zeros(200, dtype=torch.bool, device="cuda")
train_mask[:60] = True
test_mask = ~train_mask
model = Graph().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
def step():
    model.train()
    optimizer.zero_grad()
    out = model(nodes, edges)
    F.nll_loss(out[train_mask], classes[train_mask]).backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        right = model(nodes, edges).argmax(1)[test_mask] == classes[test_mask]
    assert right.shape == (140,)
    return int(right.sum()) / int(test_mask.sum())
"""

MIXED = """
class Mix(nn.Module):
    def forward(self, x, y):
        kind = int(torch.multinomial(torch.tensor([0.2, 0.5, 0.3]), 1))
        share = float(torch._sample_dirichlet(torch.tensor([0.2, 0.2]))[0])
        size, middle = int(16 * (1 - share) ** 0.5), torch.randint(16, size=(1,))
        low, high = int(torch.clamp(middle - size // 2, min=0)), int(torch.clamp(middle + size // 2, max=16))
        assert (kind, share, low, high) == (1, 0.5, 2, 12)
        x[:, :, low:high, low:high] = x.roll(1, 0)[:, :, low:high, low:high]
        return x, y.roll(1, 0).mul(1 - share).add_(y.mul(share))

mix, model = Mix(), nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def step(batch=4):
    x, y = mix(torch.rand(batch, 3, 16, 16), F.one_hot(torch.randint(0, 10, (batch,)), 10).float())
    nn.CrossEntropyLoss(label_smoothing=0.1)(model(x.cuda()), y.cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

SCRIPTS = {
    # text, layers, what is assumed beside the GPU
    "a variational autoencoder": (VAE, 0, {asked.OUTSIDE}),
    "a siamese network": (SIAMESE, None, {asked.OUTSIDE, sums.NOTE.format(4 * 64 * 16 * 13 * 13)}),  # one weight twice
    "fast neural style": (STYLE, 2, {asked.OUTSIDE}),
    "preferences beside a frozen reference": (PREFERENCE, 4, {asked.OUTSIDE}),
    "accumulation, compiled, scaled, fused, averaged": (ACCUMULATED, 4, {making.COMPILED}),
    "a policy and its target": (Q_LEARNING, 0, set()),  # two models of a class are no layers of one
    "a diffusion network with an average": (DIFFUSION, 4, {asked.OUTSIDE}),
    "labels that are refilled": (RELABELLED, None, set()),
    "batches cut from an array": (FROM_ARRAYS, None, {asked.DRAWN_OUTSIDE}),
    "nodes split by masks": (SPLIT_NODES, None, {asked.OUTSIDE}),
    "images mixed by a module": (MIXED, None, {asked.MEAN}),
}


class Counted:
    """An observer of a capture: PyTorch's counter of FLOPs."""

    def __init__(self):
        self.flops = 0

    def prepare(self, model):
        """Nothing is changed."""

    @contextmanager
    def around(self, model, optimizers):
        with FlopCounterMode(display=False) as counter:
            yield
        self.flops = counter.get_total_flops()


@pytest.mark.parametrize("what", SCRIPTS)
def test_a_script_has_pytorchs_peak_and_flops(tmp_path, what):
    text, layers, assumed = SCRIPTS[what]
    (tmp_path / "train.py").write_text(HEAD + text, encoding="utf-8")
    reference = f"{tmp_path / 'train.py'}:step"
    trace, tracker, counter = capture_from_reference(reference), Tracked("none"), Counted()
    for observer in (tracker, counter):
        capture_from_reference(reference, observer=observer)
    assert home_peak(simulate(trace, load_profile("a100_40_pcie")).log) == max(tracker.highest.values())
    assert sum(op.counted or op.flops for op in trace.ops) == counter.flops
    assert "uncounted" not in trace.meta
    assert layers is None or trace.meta["layers"] == layers
    assert set(trace.meta["assumed"]) - {cuda_calls.NOTE} == assumed

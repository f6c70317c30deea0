"""Ordinary habits of people's training scripts: each is captured as it stands, with the products that it really has."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")

from sim.errors import WorkloadError  # noqa: E402
from workloads.capture import capture_from_reference  # noqa: E402
from workloads.capturing import asked, making  # noqa: E402

HEAD = """
import copy
import torch
from torch import nn
import torch.nn.functional as F

device = "cuda"
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
x = torch.randn(8, 16, device=device)
y = torch.randint(0, 4, (8,), device=device)
"""
FIRST, SECOND = 2 * 8 * 16 * 32, 2 * 8 * 32 * 4
FORWARD = FIRST + SECOND
STEP = 2 * FORWARD + SECOND
"""FLOPs of one of its products, of a forward pass, and of a step, whose batch has no gradient."""

HABITS = {
    # what the script does: its text, and the FLOPs of all products of its step
    "a clipped gradient, a scheduler, a log": (
        """
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=100)
history = []
def step():
    opt.zero_grad()
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    if norm > 100: print("big", norm.item())
    opt.step()
    sched.step()
    history.append(loss.item())
    print(f"{loss:.4f} {sched.get_last_lr()[0]:.2e} {norm:.3f}")
""",
        STEP,
    ),
    "mixed precision with a scaler": (
        """
scaler = torch.amp.GradScaler("cuda")
def step():
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
""",
        STEP,
    ),
    "a moving average": (
        """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.99))
def step():
    F.cross_entropy(net(x), y).backward()
    opt.step()
    opt.zero_grad()
    ema.update_parameters(net)
""",
        STEP,
    ),
    "an evaluation in the step": (
        """
def step():
    net.train()
    F.cross_entropy(net(x), y).backward()
    opt.step()
    opt.zero_grad()
    net.eval()
    with torch.no_grad():
        out = net(x)
        correct = (out.argmax(1) == y).float().mean().item()
    net.train()
    print(correct)
""",
        STEP + FORWARD,
    ),
    "a function with its own backward": (
        """
class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a * torch.sigmoid(a)
    @staticmethod
    def backward(ctx, g):
        (a,) = ctx.saved_tensors
        s = torch.sigmoid(a)
        return g * (s + a * s * (1 - s))
def step():
    h = Swish.apply(net[0](x))
    F.cross_entropy(net[2](h), y).backward()
    opt.step()
    opt.zero_grad()
""",
        STEP,
    ),
    "tied weights": (
        """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.out = nn.Linear(16, 50, bias=False)
        self.out.weight = self.emb.weight
    def forward(self, i): return self.out(self.emb(i))
lm = LM().to(device)
opt2 = torch.optim.AdamW(lm.parameters())
ids = torch.randint(0, 50, (4, 8), device=device)
def step():
    F.cross_entropy(lm(ids).view(-1, 50), ids.view(-1)).backward()
    opt2.step()
    opt2.zero_grad()
""",
        3 * 2 * 32 * 16 * 50,
    ),
    "hooks on modules and gradients": (
        """
seen = {}
net[0].register_forward_hook(lambda m, a, o: seen.__setitem__("act", o.detach()))
net[2].register_full_backward_hook(lambda m, gi, go: seen.__setitem__("norm", go[0].norm().item()))
for p in net.parameters(): p.register_hook(lambda g: g.clamp(-1, 1))
def step():
    F.cross_entropy(net(x), y).backward()
    opt.step()
    opt.zero_grad()
""",
        STEP,
    ),
    "accumulated gradients": (
        """
def step():
    opt.zero_grad()
    for i in range(4):
        (F.cross_entropy(net(x), y) / 4).backward()
    opt.step()
""",
        4 * STEP,
    ),
    "two passes, with weights moved and put back": (
        """
def step(rho=0.05):
    F.cross_entropy(net(x), y).backward()
    old = {}
    with torch.no_grad():
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in net.parameters()]), p=2)
        for p in net.parameters():
            old[p] = p.data.clone()
            p.add_(p.grad * (rho / (norm + 1e-12)))
    opt.zero_grad()
    F.cross_entropy(net(x), y).backward()
    with torch.no_grad():
        for p in net.parameters(): p.data = old[p]
    opt.step()
    opt.zero_grad()
""",
        2 * STEP,
    ),
    "a penalty on the gradient": (
        """
def step():
    inp = x.clone().requires_grad_(True)
    out = net(inp)
    (g,) = torch.autograd.grad(out.sum(), inp, create_graph=True)
    loss = F.cross_entropy(out, y) + ((g.norm(2, dim=1) - 1) ** 2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
""",
        2 * FORWARD + (2 * SECOND + 2 * FIRST) + (2 * FIRST + SECOND),
    ),
    "a queue and an average inside a module": (
        """
class MoCo(nn.Module):
    def __init__(self, K=64, m=0.99):
        super().__init__()
        self.K, self.m = K, m
        self.q = nn.Linear(16, 8)
        self.k = nn.Linear(16, 8)
        for a, b in zip(self.q.parameters(), self.k.parameters()): b.data.copy_(a.data); b.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(8, K), dim=0))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))
    @torch.no_grad()
    def enqueue(self, keys):
        n = keys.shape[0]
        ptr = int(self.ptr)
        assert self.K % n == 0
        self.queue[:, ptr:ptr + n] = keys.T
        self.ptr[0] = (ptr + n) % self.K
    def forward(self, a, b):
        q = F.normalize(self.q(a), dim=1)
        with torch.no_grad():
            for p, r in zip(self.q.parameters(), self.k.parameters()): r.data = r.data * self.m + p.data * (1 - self.m)
            k = F.normalize(self.k(b), dim=1)
        pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([pos, neg], dim=1) / 0.07
        self.enqueue(k)
        return logits, torch.zeros(logits.shape[0], dtype=torch.long, device=device)
moco = MoCo().to(device)
opt2 = torch.optim.SGD(moco.q.parameters(), 0.1, momentum=0.9)
def step():
    F.cross_entropy(*moco(x, x)).backward()
    opt2.step()
    opt2.zero_grad()
""",
        2 * 2048 + 2048 + 2 * (2 * 8 * 8 + 2 * 8 * 8 * 64),
    ),
    "gradients of each sample": (
        """
from torch.func import functional_call, grad, vmap
def step():
    params = {k: v.detach() for k, v in net.named_parameters()}
    def f(p, a, b): return F.cross_entropy(functional_call(net, p, (a.unsqueeze(0),)), b.unsqueeze(0))
    per = vmap(grad(f), in_dims=(None, 0, 0))(params, x, y)
    for k, p in net.named_parameters(): p.grad = per[k].mean(0)
    opt.step()
    opt.zero_grad()
""",
        STEP,
    ),
    "a loader with workers": (
        """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
loader = DataLoader(data, batch_size=8, shuffle=True, pin_memory=True, num_workers=2)
stream = iter(loader)
def step():
    a, b = next(stream)
    a, b = a.to(device, non_blocking=True), b.to(device, non_blocking=True)
    F.cross_entropy(net(a), b).backward()
    opt.step()
    opt.zero_grad()
""",
        STEP,
    ),
    "an epoch of a loader": (
        """
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.randn(16, 16), torch.randint(0, 4, (16,))), batch_size=8, shuffle=True)
def step():
    total = 0
    for i, (a, b) in enumerate(loader):
        a, b = a.to(device), b.to(device)
        loss = F.cross_entropy(net(a), b)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item() * a.size(0)
""",
        2 * STEP,
    ),
    "a loss as an array": (
        """
import numpy as np
def step():
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    v = float(loss)
    w = loss.detach().cpu().numpy()
    print(v, np.isnan(w), loss.tolist())
""",
        STEP,
    ),
    "a distribution that is sampled": (
        """
from torch.distributions import Categorical
def step():
    d = Categorical(logits=net(x))
    a = d.sample()
    r = torch.randn(8, device=device)
    adv = (r - r.mean()) / (r.std() + 1e-8)
    loss = -(d.log_prob(a) * adv).mean() - 0.01 * d.entropy().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
""",
        STEP,
    ),
    "an optimizer that calls the step": (
        """
opt2 = torch.optim.LBFGS(net.parameters(), max_iter=2)
def step():
    def closure():
        opt2.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss
    opt2.step(closure)
""",
        2 * STEP,
    ),
    "an update in the backward pass": (
        """
opts = {p: torch.optim.SGD([p], 0.1) for p in net.parameters()}
def upd(p): opts[p].step(); opts[p].zero_grad()
for p in net.parameters(): p.register_post_accumulate_grad_hook(upd)
def step():
    F.cross_entropy(net(x), y).backward()
""",
        STEP,
    ),
    "batches mixed by a random share": (
        """
def step(alpha=0.2):
    lam = torch.distributions.Beta(alpha, alpha).sample().item()
    idx = torch.randperm(8, device=device)
    out = net(lam * x + (1 - lam) * x[idx])
    (lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[idx])).backward()
    opt.step()
    opt.zero_grad()
""",
        STEP,
    ),
    "a teacher in inference mode": (
        """
teacher = copy.deepcopy(net).eval().requires_grad_(False)
def step():
    with torch.inference_mode(): t = teacher(x)
    s = net(x)
    F.kl_div(F.log_softmax(s / 2, -1), F.softmax(t.clone() / 2, -1), reduction="batchmean").backward()
    opt.step()
    opt.zero_grad()
""",
        STEP + FORWARD,
    ),
    "an update by hand": (
        """
def step():
    F.cross_entropy(net(x), y).backward()
    with torch.no_grad():
        for p in net.parameters(): p -= 0.1 * p.grad; p.grad = None
""",
        STEP,
    ),
    "two losses on one graph": (
        """
def step():
    h = net[0](x)
    a = net[2](h).sum()
    b = h.square().sum()
    a.backward(retain_graph=True)
    b.backward()
    opt.step()
    opt.zero_grad()
""",
        FORWARD + (2 * SECOND + FIRST) + FIRST,
    ),
    "accuracies among the first k": (
        """
def step():
    out = net(x)
    loss = F.cross_entropy(out, y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    _, pred = out.topk(3, 1)
    correct = pred.t().eq(y.view(1, -1).expand_as(pred.t()))
    print([correct[:k].reshape(-1).float().sum(0).mul_(100 / 8).item() for k in (1, 3)])
""",
        STEP,
    ),
    "a model in DataParallel": (
        """
par = nn.DataParallel(net)
def step():
    F.cross_entropy(par(x), y).backward()
    opt.step()
    opt.zero_grad()
""",
        STEP,
    ),
    "a check for NaN": (
        """
def step():
    loss = F.cross_entropy(net(x), y)
    if torch.isnan(loss) or not torch.isfinite(loss): raise RuntimeError("nan")
    loss.backward()
    if any(p.grad is not None and torch.isnan(p.grad).any() for p in net.parameters()): opt.zero_grad(); return
    opt.step()
    opt.zero_grad()
""",
        STEP,
    ),
    "times and memory of the GPU": (
        """
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
def step():
    torch.cuda.synchronize()
    start.record()
    torch.cuda.reset_peak_memory_stats()
    F.cross_entropy(net(x), y).backward()
    opt.step()
    opt.zero_grad()
    end.record()
    torch.cuda.synchronize()
    print(start.elapsed_time(end), torch.cuda.max_memory_allocated() / 2**20, torch.cuda.get_device_name())
    torch.cuda.empty_cache()
""",
        STEP,
    ),
}


def captured(folder, text):
    (folder / "train.py").write_text(HEAD + text, encoding="utf-8")
    return capture_from_reference(f"{folder / 'train.py'}:step")


def phases(trace):
    """The phases of the products, in order, each run of one phase once."""
    found = [op.phase for op in trace.ops if op.flops]
    return [phase for i, phase in enumerate(found) if i == 0 or found[i - 1] != phase]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("habit", HABITS)
def test_what_people_do_is_captured_with_all_its_products(tmp_path, habit):
    text, flops = HABITS[habit]
    trace = captured(tmp_path, text)
    assert trace.meta["model_flops"] == flops
    assert "uncounted" not in trace.meta
    assert phases(trace)[:2] == ["forward", "backward"]
    assert "update" not in phases(trace) or "calls the step" in habit  # that optimizer's own are products of vectors


NOTES = {
    "a queue and an average inside a module": asked.KEPT_NUMBER,
    "a loader with workers": making.LOADED,
    "a distribution that is sampled": making.VALID,
    "a loss as an array": asked.OUTSIDE,
}


@pytest.mark.parametrize("habit", NOTES)
def test_what_is_assumed_of_it_is_noted(tmp_path, habit):
    assert NOTES[habit] in captured(tmp_path, HABITS[habit][0]).meta["assumed"]


def test_weights_that_are_given_other_storages_are_weights_still(tmp_path):
    """The step puts copies into `data`, so that what the next one begins with is a copy."""
    trace = captured(tmp_path, HABITS["two passes, with weights moved and put back"][0])
    weights = {t.name.partition(".v")[0]: t.bytes for t in trace.tensors if t.role == "weight"}
    assert weights["0.weight"] == 4 * 16 * 32
    assert weights["2.bias"] == 4 * 4


def test_a_penalty_is_part_of_the_forward_pass(tmp_path):
    """What comes after a gradient that is differentiated again is not an update yet."""
    trace = captured(tmp_path, HABITS["a penalty on the gradient"][0])
    norm = next(i for i, op in enumerate(trace.ops) if "norm" in op.name)
    assert trace.ops[norm].phase == "forward"
    assert "update" not in [op.phase for op in trace.ops[:norm]]


def test_a_number_that_a_module_stores_is_read_back(tmp_path):
    """A place in a queue: stored by one call, read by the next, it decides on a slice."""
    text = """
class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 4)
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, batch):
        place = int(self.place)
        self.place[0] = place + 2 if place < 4 else place
        return self.inner(batch[place:])

queue = Queue().to(device)
def step():
    queue(x).sum().backward()
"""
    # the file's function runs once to be known, then to warm up, so that the captured step reads 4
    assert captured(tmp_path, text).meta["model_flops"] == 2 * 2 * 4 * 16 * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "table = nn.Embedding(50, 16, sparse=True).to(device)\ndef step():\n    table(y).sum().backward()\n",
            r"in the step at train\.py:\d+ \(table\(y\)\.sum.*sparse=False",
        ),
        (
            "torch.distributed.get_rank()\ndef step():\n    pass\n",
            r"cannot be imported at train\.py:\d+ \(torch\.distributed.*simulate several with --dp",
        ),
        (
            "def step():\n    losses = F.cross_entropy(net(x), y, reduction='none')\n"
            "    losses[losses > losses.mean()].mean().backward()\n",
            r"aten\.index\.Tensor in the step cannot run without data at train\.py:\d+ .*a mask instead of a selection",
        ),
    ],
)
def test_what_is_refused_names_the_line_and_the_way_out(tmp_path, text, message):
    with pytest.raises(WorkloadError, match=message) as error:
        captured(tmp_path, text)
    assert "\n" not in str(error.value)


def test_what_is_computed_of_an_array_on_the_gpu_is_recorded_and_counts_once(tmp_path):
    text = """
import numpy as np
data = np.ones((64, 16), np.float32)
def step():
    x = torch.from_numpy(data)
    x = (x + 1).to(device)
    x = (x - x.mean()) * 2
    loss = net(x.view(2, 32, 16)).sum()
    loss.backward()
    opt.step()
    opt.zero_grad()
"""
    trace = captured(tmp_path, text)
    assert [op.name for op in trace.ops if op.phase == "forward"][:5] == [
        "lift_fresh",
        "lift_fresh.2",
        "mean",
        "sub",
        "mul",
    ]
    whole = [t.name for t in trace.tensors if t.bytes == 64 * 16 * 4 and t.role != "weight"]
    assert whole == ["lift_fresh.out", "lift_fresh.out.2", "sub.out", "mul.out"]


def test_a_batch_on_the_host_that_a_product_reads_in_another_shape_counts_once(tmp_path):
    text = """
import numpy as np
def step():
    loss = net(torch.from_numpy(np.ones((2, 32, 16), np.float32))).sum()
    loss.backward()
    opt.step()
    opt.zero_grad()
"""
    trace = captured(tmp_path, text)
    assert [t.name for t in trace.tensors if t.bytes == 64 * 16 * 4 and t.role != "weight"] == ["lift_fresh.out"]

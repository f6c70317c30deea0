"""A captured step lives as PyTorch's own memory tracker sees it, to the byte, and replays with the same peak."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")

from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed._tools import mem_tracker  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from sim.analysis.peak_memory import peak_memory  # noqa: E402
from sim.errors import WorkloadError  # noqa: E402
from sim.experiment import reference_run  # noqa: E402
from sim.hardware.profile import load_profile  # noqa: E402
from sim.trace.io import load, save  # noqa: E402
from tests.workloads.hugging_face import ForCausalLM  # noqa: E402
from workloads.capture import capture, capture_from_reference  # noqa: E402


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=b > 8), nn.MaxPool2d(2))
            for a, b in ((3, 8), (8, 16), (16, 32))
        )
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(functional.dropout(x.flatten(1), 0.1, self.training))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 50)

    def forward(self, ids):
        return self.head(self.lstm(self.embedding(ids))[0]).flatten(0, 1)


class Tied(nn.Module):
    """The embedding is the head: its gradient is a sum."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.mix(self.embedding(ids)))).flatten(0, 1)


class Square(torch.autograd.Function):
    """Keeps an 8-bit copy of its input instead of the input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward((x * 16).to(torch.int8))
        return x * x

    @staticmethod
    def backward(ctx, g):
        (packed,) = ctx.saved_tensors
        return 2 * g * (packed.to(g.dtype) / 16)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 10)

    def forward(self, x):
        return self.second(Square.apply(self.first(x)))


class LoRALinear(nn.Module):
    def __init__(self, inner, columns, rank):
        super().__init__()
        self.base = nn.Linear(inner, columns)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.zeros(rank, inner))
        self.up = nn.Parameter(torch.zeros(columns, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(LoRALinear(64, 64, 4) for _ in range(3))
        self.head = LoRALinear(64, 10, 4)

    def forward(self, x):
        for layer in self.layers:
            x = functional.gelu(layer(x))
        return self.head(x)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class Attention(nn.Module):
    """One pre-norm layer with dropout and causal attention."""

    def __init__(self, width, heads, probability=0.1):
        super().__init__()
        self.heads, self.probability = heads, probability
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, sequence, width = x.shape
        q, k, v = (
            y.view(batch, sequence, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(width, dim=2)
        )
        p = self.probability if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        y = self.proj(y.transpose(1, 2).reshape(batch, sequence, width))
        x = x + functional.dropout(y, p, self.training)
        y = self.fc2(functional.gelu(self.fc(self.ln2(x)), approximate="tanh"))
        return x + functional.dropout(y, p, self.training)


class GPT(nn.Module):
    def __init__(self, layers=3, width=64, heads=4, vocabulary=100, positions=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.h:
            x = layer(x)
        return (self.ln_f(x) @ self.wte.weight.t()).flatten(0, 1)


class ComposedGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


class GPT2(nn.Module):
    """Hugging Face's GPT-2 as far as memory goes: composed gelu, dropout behind the embeddings, a tied head."""

    class Block(Attention):
        def __init__(self, width, heads):
            super().__init__(width, heads)
            self.act = ComposedGELU()

        def forward(self, x):
            batch, sequence, width = x.shape
            qkv = self.qkv(self.ln1(x)).split(width, dim=2)
            q, k, v = (y.view(batch, sequence, self.heads, -1).transpose(1, 2) for y in qkv)
            y = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.probability, is_causal=True)
            y = self.proj(y.transpose(1, 2).reshape(batch, sequence, width))
            x = functional.dropout(y, self.probability) + x
            return x + functional.dropout(self.fc2(self.act(self.fc(self.ln2(x)))), self.probability)

    def __init__(self, layers, width, heads, vocabulary=50257, positions=1024):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(self.Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]).unsqueeze(0))
        x = functional.dropout(x, 0.1)
        for layer in self.h:
            x = layer(x)
        return self.head(self.ln_f(x))


def shifted_loss(logits, labels):
    logits = logits.float()
    labels = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


class VGG16(nn.Sequential):
    def __init__(self):
        layers, width = [], 3
        for after in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
            layers += [nn.Conv2d(width, after, 3, padding=1), nn.ReLU()] if after else [nn.MaxPool2d(2)]
            width = after or width
        hidden = [nn.Linear(25088, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()]
        super().__init__(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(7), nn.Flatten(), *hidden, nn.Linear(4096, 1000))


class UNet(nn.Module):
    """A step of a diffusion model: down, attention over places with the time added, up, with a link across."""

    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1)])
        self.norm, self.time = nn.GroupNorm(4, 32), nn.Linear(8, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.up, self.out = nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.Linear(32 * 32 * 32, 10)
        self.register_buffer("frequencies", torch.arange(4.0))

    def forward(self, x):
        angles = x[:, 0, 0, :1] * self.frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        wide = functional.silu(self.down[0](x))
        low = functional.silu(self.norm(self.down[1](wide))) + time[:, :, None, None]
        rows = low.flatten(2).transpose(1, 2)
        rows = rows + self.attention(rows, rows, rows, need_weights=False)[0]
        low = rows.transpose(1, 2).reshape(low.shape)
        return self.out(torch.cat([wide, self.up(low)], dim=1).flatten(1))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = x[:, None].expand(-1, 6, -1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Frozen(nn.Module):
    """A backbone without gradients, its batch norm still in training, under a head that learns."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.backbone(x).mean((2, 3)))


class Written(nn.Module):
    """Ops in place on whole tensors and on parts of one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, x):
        y = self.first(x).add_(1.0).relu_()
        both = torch.zeros(x.shape[0], 128)
        both[:, :64] = y
        both[:, 64:] = y * 2
        return self.second(both.view(-1, 2, 64).sum(1)).mul_(2)


class Spectral(nn.Module):
    """Complex weights, multiplied in the frequency domain."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 10)
        self.weight = nn.Parameter(torch.zeros(17, dtype=torch.cfloat))

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=32))


class Narrow(nn.Module):
    """A copy of an activation in 8-bit floats."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, x):
        y = self.first(x)
        return self.head(y * y.detach().to(torch.float8_e4m3fn).to(y.dtype))


class Reentrant(Checkpointed):
    def forward(self, x):
        x = x + self.layers[0](x)
        for layer in self.layers[1:]:
            x = x + checkpoint(layer, x, use_reentrant=True)
        return self.head(x)


def images():
    return torch.zeros(4, 3, 32, 32), torch.zeros(4, dtype=torch.int64)


def tokens():
    return torch.zeros(4, 12, dtype=torch.int64), torch.zeros(48, dtype=torch.int64)


def rows(width):
    return lambda: (torch.zeros(16, width), torch.zeros(16, dtype=torch.int64))


def adam(parameters):
    return torch.optim.AdamW(parameters, foreach=True)


def adam_loop(parameters):
    return torch.optim.AdamW(parameters, foreach=False)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)


CASES = {
    "convolution": (ConvNet, images, momentum, 1),
    "recurrent": (Recurrent, tokens, adam, 1),
    "tied": (Tied, tokens, adam_loop, 1),
    "custom": (Custom, rows(64), adam, 1),
    "two_micro_batches": (ConvNet, images, momentum, 2),
    "tied_two_micro_batches": (Tied, tokens, adam, 2),
    "lora": (LoRA, rows(64), adam, 1),
    "checkpointed": (Checkpointed, rows(32), adam_loop, 1),
    "attention": (GPT, tokens, adam, 1),
    "no_optimizer": (Custom, rows(64), None, 1),
    "unet": (UNet, images, adam, 1),
    "encoder": (Encoder, rows(32), adam, 3),
    "frozen": (Frozen, images, adam, 1),
    "in_place": (Written, rows(32), adam_loop, 1),
    "complex": (Spectral, rows(32), adam, 1),
    "float8": (Narrow, rows(32), momentum, 1),
    "reentrant": (Reentrant, rows(32), adam, 1),
    "hugging_face": (lambda: ForCausalLM(3), tokens, adam, 1),
    "hugging_face_two_micro_batches": (lambda: ForCausalLM(2), tokens, adam_loop, 2),
}
LOSS = functional.cross_entropy


def captured(case, **changes):
    module, batch, optimizer, micro_batches = CASES[case]
    return capture(
        module,
        lambda: batch()[0],
        targets=lambda: batch()[1],
        loss=LOSS,
        optimizer=optimizer,
        micro_batches=micro_batches,
        **{"kernels": "cpu", **changes},
    )


class Tracker(mem_tracker.MemTracker):
    """MemTracker for modules with frozen parameters, too: without the hooks that tell gradients from temporaries."""

    def _track_module_params_and_buffers(self, module, install_grad_hooks=True):
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)


def tracked(case, monkeypatch, rounding):
    """Peak of the same step by PyTorch's MemTracker, its sizes rounded as asked (it rounds on CUDA only)."""
    monkeypatch.setattr(
        mem_tracker._WeakRefInfo,
        "_calculate_mem_consumed",
        lambda self: -(-self.size * self.element_size // rounding) * rounding,
    )
    module, batch, optimizer, micro_batches = CASES[case]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = module()
        x, y = batch()
        tuned = optimizer([p for p in model.parameters() if p.requires_grad]) if optimizer else None

        tracker = Tracker()

        def iteration():
            for _ in range(micro_batches):
                tracker.reset_mod_stats()  # it refuses a second forward pass otherwise
                loss = LOSS(model(x), y)
                loss.backward()
            if tuned:
                tuned.step()
                tuned.zero_grad()

        iteration()
        model.zero_grad()
        tracker.track_external(model, x, y, *([tuned] if tuned else []))
        with tracker:
            iteration()
    (of_device,) = tracker.get_tracker_snapshot("peak").values()
    return of_device["Total"]


def replayed(trace):
    return peak_memory(reference_run(trace, load_profile("a100_80_sxm"))).bytes


@pytest.mark.parametrize("case", CASES)
def test_the_peak_is_that_of_the_memory_tracker(case, monkeypatch):
    assert replayed(captured(case, rounding=512)) == tracked(case, monkeypatch, 512)


@pytest.mark.parametrize("case", ["convolution", "tied_two_micro_batches", "lora"])
def test_true_sizes_give_the_peak_without_rounding(case, monkeypatch):
    assert replayed(captured(case)) == tracked(case, monkeypatch, 1)


def test_a_capture_is_reproducible_and_survives_a_file(tmp_path):
    trace = captured("attention")
    assert captured("attention") == trace
    save(trace, tmp_path / "trace.jsonl")
    assert load(tmp_path / "trace.jsonl") == trace


# ---- against figures of the CUDA path that were made without this code ---------------------------


@pytest.mark.parametrize(("batch", "optimizer", "peak"), [(8, adam, 2772450816), (32, momentum, 3986820608)])
def test_vgg_16_on_cuda_kernels_has_the_reference_peak(batch, optimizer, peak):
    trace = capture(
        VGG16,
        torch.zeros(batch, 3, 224, 224, device="meta"),
        targets=torch.zeros(batch, dtype=torch.int64, device="meta"),
        loss=LOSS,
        optimizer=optimizer,
        kernels="cuda",
        rounding=512,
    )
    assert replayed(trace) == peak
    assert trace.meta["mapped"] == {"dropout": 2}


@pytest.mark.parametrize(("precision", "kernel"), [("fp32", "memory-efficient attention"), ("bf16", "flash attention")])
def test_gpt2_on_cuda_kernels_has_the_reference_peak(precision, kernel):
    with (Path(__file__).parents[1] / "validation/data/pytorch_memory.csv").open(encoding="utf-8") as file:
        rows = {row["case_id"]: row for row in csv.DictReader(file)}
    row = rows[f"gpt2-small_sdpa_b2_s512_d0.1_{precision}_none_adamw_foreach"]
    ids = torch.zeros(2, 512, dtype=torch.int64, device="meta")
    trace = capture(
        lambda: GPT2(12, 768, 12).to(torch.float32 if precision == "fp32" else torch.bfloat16),
        ids,
        targets=ids,
        loss=shifted_loss,
        optimizer=torch.optim.AdamW,
        kernels="cuda",
        rounding=512,
    )
    assert trace.meta["mapped"] == {"dropout": 25, kernel: 12}
    assert trace.meta["parameters"] == int(row["n_params"])
    # in 16 bits the CPU's layer norms keep their statistics in 16 bits, CUDA's in fp32
    assert replayed(trace) == pytest.approx(int(row["peak_total"]), rel=1e-4 if precision == "bf16" else 0)
    for phase in ("forward", "backward"):
        assert sum(int(trace.counted_flops[o.id]) for o in trace.ops if o.phase == phase) == int(row[f"flops_{phase}"])


# ---- what a trace says -------------------------------------------------------------------------


def test_ops_tensors_and_layers_are_named_after_the_module():
    trace = captured("convolution")
    ops = {o.name: o for o in trace.ops}
    assert ops["blocks.1.0.convolution"].kind == "conv"
    assert ops["blocks.1.0.convolution"].layer == 1
    assert ops["blocks.1.0.convolution_backward"].phase == "backward"
    assert ops["blocks.1.0.convolution_backward"].layer == 1
    assert ops["head.addmm"].layer == -1
    assert trace.meta["layer_names"] == ["blocks.0", "blocks.1", "blocks.2"]
    tensors = {t.name: t for t in trace.tensors}
    assert tensors["blocks.2.0.weight"].role == "weight"
    assert tensors["blocks.2.0.weight.grad"].role == "gradient"
    assert tensors["blocks.2.0.weight.grad"].layer == 2
    assert tensors["blocks.2.0.weight.momentum_buffer"].role == "optimizer_state"
    assert tensors["input0"].role == "input"
    assert tensors["blocks.0.2.relu.out"].saved_for
    phases = [o.phase for o in trace.ops]
    assert phases == sorted(phases, key=("forward", "backward", "update").index)


def test_an_overwritten_storage_is_one_value_after_another():
    trace = captured("convolution")
    tensors = {t.name: t for t in trace.tensors}
    assert tensors["head.weight.v1"].replaces == tensors["head.weight"].id
    assert tensors["blocks.0.1.running_mean.v1"].replaces == tensors["blocks.0.1.running_mean"].id
    assert "blocks.0.1.running_mean.v1" in {
        trace.tensors[t].name for o in trace.ops for t in o.writes if "statistics" in o.name
    }
    # the second block's relu works in place
    assert tensors["blocks.1.1.native_batch_norm.out.v1"].replaces == tensors["blocks.1.1.native_batch_norm.out"].id


def test_every_weight_and_state_is_carried_to_the_next_iteration():
    trace = captured("lora")
    first = {b for _, b in trace.carry}
    kept = {t.id for t in trace.tensors if t.role in ("weight", "optimizer_state") and trace.producer[t.id] < 0}
    assert first == kept
    frozen = {t.name for t in trace.tensors if t.name.startswith("layers.0.base") and t.role == "weight"}
    assert frozen == {"layers.0.base.weight", "layers.0.base.bias"}  # no gradient, no state, no new value


def test_flops_are_those_of_pytorchs_counter():
    module, batch, _, _ = CASES["attention"]
    model, (x, y) = module(), batch()
    with FlopCounterMode(display=False) as counter:
        LOSS(model(x), y).backward()
    assert captured("attention").meta["model_flops"] == counter.get_total_flops()


def test_recomputed_forward_ops_belong_to_backward_and_are_no_model_flops():
    trace = captured("checkpointed")
    products = [o for o in trace.ops if o.kind == "matmul"]
    forward = sum(o.flops for o in products if o.phase == "forward")
    backward = sum(o.flops for o in products if o.phase == "backward")
    again = forward + backward - trace.meta["model_flops"]
    # early stop: all that backward needs of a layer is there before its second product, which is not recomputed
    assert again == 4 * 2 * (16 * 32 * 128)
    assert trace.meta["model_flops"] == 3 * forward - 2 * 16 * 32 * 128  # the input needs no gradient


def test_cuda_kernels_keep_a_mask_of_one_byte_and_draw_random_numbers_in_one_op():
    trace = captured("convolution", kernels="cuda")
    (dropout,) = (o for o in trace.ops if o.random)
    assert [trace.tensors[t].bytes for t in dropout.writes] == [4 * 512 * 4, 4 * 512]
    assert trace.meta["kernels"] == "cuda"
    assert not captured("convolution").meta["mapped"]


def test_what_the_module_keeps_lives_until_it_is_replaced():
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            x = self.linear(x)
            self.cache = x.detach() * 2
            return x.sum()

    trace = capture(Cache, torch.zeros(4, 8))
    made = [t for t in trace.outputs if trace.tensors[t].role == "activation"]
    assert [trace.tensors[t].bytes for t in made] == [4 * 8 * 4]
    start = trace.ops[0]
    assert start.name == "start"  # the cache of the iteration before, released when the new one is there
    assert trace.ops[trace.released[start.writes[0]]].name == "mul"
    assert trace.readers(start.writes[0]) == ()


# ---- what may be given -----------------------------------------------------------------------------


def test_a_real_module_and_its_optimizer_are_copied_and_left_alone():
    torch.manual_seed(0)
    model = Tied()
    tuned = adam(model.parameters())
    ids = tokens()
    LOSS(model(ids[0]), ids[1]).backward()
    tuned.step()
    tuned.zero_grad()
    before = {name: p.clone() for name, p in model.named_parameters()}
    trace = capture(model, ids[0], targets=ids[1], loss=LOSS, optimizer=tuned)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    assert trace.meta["parameters"] == 50 * 16 + 16 * 16 + 16
    assert replayed(trace) == replayed(capture(Tied, ids[0], targets=ids[1], loss=LOSS, optimizer=adam))


@pytest.mark.parametrize("warm_up", [0, 1])
def test_the_steps_of_an_optimizer_in_use_are_counted_on_the_host(warm_up):
    model = Tied()
    tuned = adam(model.parameters())
    ids = tokens()
    LOSS(model(ids[0]), ids[1]).backward()
    tuned.step()
    trace = capture(model, ids[0], targets=ids[1], loss=LOSS, optimizer=tuned, warm_up=warm_up)
    assert not any(tensor.name.endswith(".step") for tensor in trace.tensors)
    assert trace.meta["on_host"] == len(list(model.parameters()))


def test_a_step_of_ones_own_is_captured():
    def step(model, tuned, x):
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        tuned.step()
        tuned.zero_grad()

    trace = capture(Custom, torch.zeros(16, 64), optimizer=momentum, step=step)
    assert {o.phase for o in trace.ops} == {"forward", "backward", "update"}
    clipping = next(o for o in trace.ops if "_foreach_norm" in o.name or "linalg_vector_norm" in o.name)
    assert clipping.phase == "update"


def test_a_reference_names_a_function(tmp_path, monkeypatch):
    (tmp_path / "my_step.py").write_text(
        textwrap.dedent("""
            import torch

            def step():
                return dict(module=lambda: torch.nn.Linear(8, 1), inputs=torch.zeros(4, 8), loss=torch.sum)

            def wrong():
                return dict(module=torch.nn.Linear, input=torch.zeros(4, 8))
        """)
    )
    monkeypatch.chdir(tmp_path)
    assert capture_from_reference("my_step:step", name="mine").meta["model"] == "mine"
    assert len(capture_from_reference(f"{tmp_path / 'my_step.py'}:step").ops) > 3
    for reference, message in (
        ("my_step", "expected 'module:function'"),
        ("my_step:stop", "did you mean 'step'"),
        ("my_step:wrong", "'input' is unknown.*did you mean 'inputs'"),
        ("no_such_module:step", "cannot be imported"),
    ):
        with pytest.raises(WorkloadError, match=message):
            capture_from_reference(reference)


def test_what_a_script_has_in_place_of_a_step_is_named_with_what_to_write(tmp_path, monkeypatch):
    """A training script whose step takes its batch from a loop, and whose model lies beside it."""
    (tmp_path / "my_script.py").write_text(
        textwrap.dedent("""
            import torch
            from torch import nn

            model = nn.Linear(8, 1)

            def train_step(x, *, y, scale=1):
                (model(x) - y).square().mean().backward()
        """)
    )
    monkeypatch.chdir(tmp_path)
    for reference, message in (
        ("my_script:train_step", "nobody gives the function its x, y: .* as in def train_step\\(batch=8\\)"),
        (
            "my_script:model",
            "this is the module Linear and no training step: name a function that is one step .* or a dict",
        ),
        ("my_script:go", "no function 'go' \\(valid: 'train_step'\\)$"),
    ):
        with pytest.raises(WorkloadError, match=message):
            capture_from_reference(reference)


class Choosy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.pick = self.Pick()

    class Pick(nn.Module):
        def forward(self, x):
            return x[x > 0]

    def forward(self, x):
        return self.pick(self.inner(x)).sum()


def test_what_needs_data_is_named_with_its_module():
    with pytest.raises(WorkloadError, match=r"op aten\.\w+.* in module 'pick' cannot run without data"):
        capture(Choosy, torch.zeros(4, 8))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        return (y * 2 if y.sum() > 0 else y).sum()


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True)

    def forward(self, ids):
        return self.table(ids).sum()


def compiled_whole():
    return torch.compile(nn.Linear(8, 1))


def compiled_part():
    return nn.Sequential(nn.Linear(8, 8), torch.compile(nn.Linear(8, 1)))


def compiled_in_place():
    module = nn.Linear(8, 1)
    module.compile()
    return module


@pytest.mark.parametrize(
    ("module", "inputs", "message"),
    [
        (Branching, torch.zeros(4, 8), r"_local_scalar_dense.* cannot run without data"),
        (
            Sparse,
            torch.zeros(4, dtype=torch.int64),
            r"in module 'table'.*sparse_coo tensors have no.*sparse=False",
        ),
        (compiled_whole, torch.zeros(4, 8), r"it was compiled with torch.compile"),
        (compiled_part, torch.zeros(4, 8), r"part '1' was compiled with torch.compile"),
        (compiled_in_place, torch.zeros(4, 8), r"it was compiled with torch.compile"),
    ],
)
def test_what_cannot_be_captured_is_named_not_guessed(module, inputs, message):
    with pytest.raises(WorkloadError, match=message):
        capture(module, inputs, loss=torch.sum)


def test_a_compiled_function_runs_as_it_was_before():
    class Calls(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.inner, self.function = nn.Linear(8, 8), function

        def forward(self, x):
            return self.function(self.inner(x)).sum()

    def plain(x):
        return torch.tanh(x) * x

    compiled = torch.compile(plain)
    assert capture(lambda: Calls(compiled), torch.zeros(4, 8)) == capture(lambda: Calls(plain), torch.zeros(4, 8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernels": "cud"}, "did you mean 'cuda'"),
        ({"micro_batches": 0}, "micro_batches: needs an integer of at least 1"),
        ({"loss": None}, "loss: the step has no scalar"),
        ({"module": 3}, "module: needs a torch.nn.Module"),
        ({"optimizer": 3}, "optimizer: needs a function"),
        ({"inputs": torch.zeros(2, 2)}, "the step failed: RuntimeError: .*2, 2"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    right = {"module": lambda: nn.Linear(8, 8), "inputs": torch.zeros(4, 8), "loss": torch.sum}
    with pytest.raises(WorkloadError, match=message):
        capture(**{**right, **changes})


@pytest.mark.slow
def test_gpt2_xl_is_captured_in_ten_seconds_and_a_gigabyte():
    program = f"""
        import importlib.util, json, resource, sys, time
        spec = importlib.util.spec_from_file_location("models", {__file__!r})
        m = importlib.util.module_from_spec(spec)
        sys.modules["models"] = m
        spec.loader.exec_module(m)
        ids = m.torch.zeros(4, 1024, dtype=m.torch.int64)
        began = time.process_time()
        given = dict(targets=ids, loss=m.shifted_loss, optimizer=m.adam, kernels="cuda")
        trace = m.capture(lambda: m.GPT2(48, 1600, 25), ids, **given)
        took = time.process_time() - began
        print(json.dumps([took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, trace.meta["parameters"]]))
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    seconds, memory, parameters = json.loads(ran.stdout)
    assert parameters == 1_557_611_200
    assert seconds < 10
    assert memory < 10**9


# ---- arithmetic that PyTorch's counter does not know -----------------------------------------------


def products(trace):
    """FLOPs of each product, convolution and attention, by phase and op."""
    kinds = ("matmul", "attention", "conv")
    return [(op.phase, op.name.rpartition(".")[2] or op.name, op.flops) for op in trace.ops if op.kind in kinds]


class Attends(torch.nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.wide = wide
        self.qkv = torch.nn.Parameter(torch.empty(3, 2, 2, 8, 16))

    def forward(self, x):
        q, k, v = self.qkv * x
        return torch.nn.functional.scaled_dot_product_attention(q[:, :, : self.wide], k, v, is_causal=False).sum()


@pytest.mark.parametrize("wide", [8, 5])
def test_the_cpus_flash_attention_counts_as_the_products_that_it_is(wide):
    trace = capture(lambda: Attends(wide), (torch.empty(()),), kernels="cpu")
    once = 2 * 2 * 2 * wide * 8 * 16  # one product of queries and keys
    assert [flops for _, _, flops in products(trace)] == [2 * once, 5 * once]
    assert "uncounted" not in trace.meta


class Grouped(torch.nn.Module):
    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.w = torch.nn.Parameter(torch.empty(4, 32, 16, dtype=dtype))

    def forward(self, x, ends):
        return torch._grouped_mm(x, self.w, offs=ends).float().sum()


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this PyTorch has no grouped products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_experts_count_each_row_once(dtype):
    x = torch.empty(64, 32, dtype=dtype, requires_grad=True)
    ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32)
    trace = capture(lambda: Grouped(dtype), (x, ends))
    assert [flops for _, _, flops in products(trace)] == [2 * 64 * 32 * 16] * 3
    # the result of forward, the gradients of the rows and of the experts' matrices
    sizes = [trace.tensors[op.writes[0]].shape for op in trace.ops if op.kind == "matmul"]
    assert sorted(sizes) == sorted([(64, 16), (64, 32), (4, 32, 16)])
    with pytest.raises(WorkloadError, match=r"\(64, 31\) and \(4, 32, 16\) can't be multiplied"):
        capture(lambda: Grouped(dtype), (torch.empty(64, 31, dtype=dtype), ends))


class Sums(torch.nn.Module):
    """Products in the forms that einsum and friends are lowered to."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.empty(*shape)) for shape in ((3, 4, 5), (3, 5, 6)))

    def forward(self, v, start):
        lowered = torch.einsum("gij,gjk->gik", self.a, self.b).sum()
        added = torch.addbmm(start, self.a, self.b).sum() + torch.baddbmm(start.expand(3, 4, 6), self.a, self.b).sum()
        return lowered + added + torch.mv(self.a[0], v).sum() + torch.dot(v, self.a[0, 0])


def test_every_form_of_a_product_has_flops():
    trace = capture(Sums, (torch.empty(5), torch.empty(4, 6)))
    whole = 2 * 3 * 4 * 5 * 6
    forward = [flops for phase, _, flops in products(trace) if phase == "forward"]
    assert forward == [whole, whole, whole, 2 * 4 * 5, 2 * 5]
    assert all(flops for _, _, flops in products(trace))
    assert "uncounted" not in trace.meta


@pytest.mark.parametrize("case", ["tied", "tied_two_micro_batches"])
def test_what_is_added_to_a_gradient_is_a_gradient(case):
    trace = captured(case)
    sums = [op for op in trace.ops if op.phase == "backward" and op.name.split(".")[-1].rstrip("_0123456789") == "add"]
    parts = [t for op in sums for t in op.reads]
    assert parts
    assert {trace.tensors[t].role for t in parts} == {"gradient"}


# ---- autocast as it is on CUDA ---------------------------------------------------------------------


class Mixed(torch.nn.Module):
    """A product, a norm, a softmax, a power and a loss under autocast; then a product where it is switched off."""

    def __init__(self, context):
        super().__init__()
        self.a, self.b = torch.nn.Linear(16, 16), torch.nn.Linear(16, 10)
        self.norm = torch.nn.LayerNorm(16)
        self.context = context

    def forward(self, x):
        with self.context():
            h = torch.softmax(self.norm(self.a(x)).bfloat16(), -1)
            with torch.autocast("cuda", enabled=False):
                h = torch.mm(h.float(), self.a.weight)
            h = self.b(h)
            loss = torch.nn.functional.cross_entropy(h, torch.zeros(4, dtype=torch.long))
            return loss + h.pow(2).mean()


def results(trace):
    """Types of what each forward op makes, by the op's name without module and number; casts apart."""
    found = {}
    for op in trace.ops:
        name = op.name.removesuffix(".2").rpartition(".")[2]
        if op.phase == "forward" and name != "_to_copy":
            found.setdefault(name, []).append(trace.tensors[op.writes[0]].dtype)
    return found


@pytest.mark.parametrize(
    ("context", "half"),
    [
        (lambda: torch.autocast("cuda", dtype=torch.bfloat16), "bf16"),
        (lambda: torch.autocast(device_type="cuda", dtype=torch.float16), "fp16"),
        (lambda: torch.autocast("cuda"), "fp16"),  # its default there
        (lambda: torch.amp.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False), "bf16"),
        (lambda: torch.cuda.amp.autocast(dtype=torch.bfloat16), "bf16"),
        (lambda: torch.cuda.amp.autocast(), "fp16"),
    ],
)
@pytest.mark.parametrize("kernels", ["cpu", "cuda"])
@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.autocast.*:FutureWarning")
@pytest.mark.filterwarnings("error:.*Disabling autocast.*")
def test_autocast_for_cuda_casts_what_it_casts_there(context, half, kernels):
    trace = capture(lambda: Mixed(context), (torch.empty(4, 16),), kernels=kernels)
    made = results(trace)
    assert made["addmm"] == [half, half]
    assert made["mm"] == ["fp32"]  # where it is switched off
    for name in ("native_layer_norm", "_softmax", "_log_softmax", "nll_loss_forward", "pow"):
        assert made[name] == ["fp32"], name
    assert trace.meta["mapped"]["autocast"] == 1


def test_autocast_that_is_switched_off_or_for_the_cpu_is_as_ever():
    off = results(capture(lambda: Mixed(lambda: torch.autocast("cuda", enabled=False)), (torch.empty(4, 16),)))
    assert off["addmm"] == ["fp32", "fp32"]

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Linear(16, 16)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return torch.softmax(self.a(x), -1).sum()

    here = results(capture(Plain, (torch.empty(4, 16),)))
    assert (here["addmm"], here["_softmax"]) == (["bf16"], ["bf16"])  # a CPU's list


def test_nothing_of_it_is_left_after_a_capture():
    before = torch.autocast.__init__
    capture(lambda: Mixed(lambda: torch.autocast("cuda", dtype=torch.bfloat16)), (torch.empty(4, 16),))
    assert torch.autocast.__init__ is before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = torch.ones(4, 4) @ torch.ones(4, 4)
        assert (product.dtype, torch.softmax(product, -1).dtype) == (torch.bfloat16, torch.bfloat16)
        assert torch.equal(torch.softmax(product, -1), torch.full((4, 4), 0.25, dtype=torch.bfloat16))


class Convolved(torch.nn.Module):
    def __init__(self, kind, channels, columns, groups, **more):
        super().__init__()
        self.first = torch.nn.Parameter(torch.empty(2, channels, 10, 10))
        self.conv = kind(channels, columns, 2, groups=groups, bias=False, **more)

    def forward(self):
        return self.conv(self.first).sum()


@pytest.mark.parametrize(
    ("kind", "channels", "columns", "groups", "pixels"),
    [
        (nn.Conv2d, 8, 12, 1, 9 * 9),
        (nn.Conv2d, 8, 12, 4, 9 * 9),
        (nn.Conv2d, 8, 8, 8, 9 * 9),
        (nn.ConvTranspose2d, 8, 12, 4, 10 * 10),
    ],
)
def test_a_grouped_convolution_runs_backward_in_twice_its_forward(kind, channels, columns, groups, pixels):
    trace = capture(lambda: Convolved(kind, channels, columns, groups))
    once = 2 * 2 * pixels * (channels // groups) * columns * 2 * 2  # a channel meets those of its group alone
    assert [flops for _, _, flops in products(trace)] == [once, 2 * once]


class InPlace(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.empty(*shape)) for shape in ((3, 4, 5), (3, 5, 6)))

    def forward(self, start):
        batched = (start * 1).baddbmm_(self.a, self.b).sum()
        single = (start[0] * 1).addmm_(self.a[0], self.b[0]).sum()
        return batched + single + (start[0] * 1).addbmm_(self.a, self.b).sum()


def test_a_product_in_place_is_a_product():
    trace = capture(InPlace, (torch.empty(3, 4, 6),))
    forward = [flops for phase, _, flops in products(trace) if phase == "forward"]
    assert forward == [2 * 3 * 4 * 5 * 6, 2 * 4 * 5 * 6, 2 * 3 * 4 * 5 * 6]


def test_order_of_channels_is_that_of_the_module():
    """Images with channels last are noted: no chip transposes them (tests/hardware/test_image_order.py)."""
    images = torch.empty(2, 3, 32, 32, device="meta")
    first = capture(ConvNet, images, loss=lambda y: y.sum())
    last = capture(lambda: ConvNet().to(memory_format=torch.channels_last), images, loss=lambda y: y.sum())
    assert "channels_last" not in first.meta
    assert last.meta["channels_last"] is True


def test_products_round_to_tf32_as_pytorch_is_set():
    """Convolutions by default, products where they are allowed to, nothing where TF32 is off."""

    def kinds():
        trace = capture(ConvNet, torch.empty(2, 3, 32, 32, device="meta"), loss=lambda y: y.sum())
        return {(op.kind, op.dtype) for op in trace.ops if op.kind in ("conv", "matmul")}

    convolutions, products = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = convolutions.fp32_precision, products.fp32_precision
    try:
        assert kinds() == {("conv", "tf32"), ("matmul", "fp32")}
        products.fp32_precision = "tf32"
        assert kinds() == {("conv", "tf32"), ("matmul", "tf32")}
        convolutions.fp32_precision = "ieee"
        assert kinds() == {("conv", "fp32"), ("matmul", "tf32")}
    finally:
        convolutions.fp32_precision, products.fp32_precision = before

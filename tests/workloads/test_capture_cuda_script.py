"""Scripts that were written for a GPU are captured as they are; where they cannot be, their own line is named."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")

from torch import nn  # noqa: E402

from sim.errors import WorkloadError  # noqa: E402
from workloads.capture import capture, capture_from_reference  # noqa: E402
from workloads.capturing import cuda_calls  # noqa: E402


def net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


class Script:
    """A step as people write it for a GPU, with a scaler, clipping, and a log."""

    def __init__(self, device):
        self.device, self.scaler, self.seen = device, None, []

    def __call__(self, model, tuned, x, labels):
        device = self.device
        if self.scaler is None and device == "cuda":
            self.scaler = torch.amp.GradScaler("cuda")
        model = model.to(device)
        x, labels = x.to(device, non_blocking=True), labels.to(device)
        if device == "cuda":
            x = x.cuda().pin_memory().to(0)
            torch.cuda.synchronize()
            began = torch.cuda.Event(enable_timing=True)
            began.record()
        with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), labels)
        weights = torch.ones(4, device=device)
        loss = loss * weights.mean()
        if not math.isfinite(loss.item()) or not torch.isfinite(loss) or torch.isnan(loss).any():
            raise RuntimeError("diverged")
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.scaler:
            self.scaler.unscale_(tuned)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        if self.scaler:
            self.scaler.step(tuned)
            self.scaler.update()
        else:
            tuned.step()
        tuned.zero_grad(set_to_none=True)
        self.seen.append((float(norm), torch.cuda.max_memory_allocated() if device == "cuda" else 0, f"{loss:.3f}"))


def step_of(device):
    script = Script(device)
    inputs = (torch.empty(8, 16, device="meta"), torch.empty(8, dtype=torch.int64, device="meta"))
    return capture(net, inputs, optimizer=adam, step=script), script


def test_a_script_for_a_gpu_is_captured_as_it_is():
    trace, script = step_of("cuda")
    assert script.seen == [(1.0, 0, "1.000")] * 2
    names = [op.name for op in trace.ops]
    assert any("_amp_foreach_non_finite_check_and_unscale_" in name for name in names)
    assert any("_amp_update_scale_" in name for name in names)
    assert sum("_foreach_addcdiv_" in name for name in names)  # the optimizer has stepped
    said = trace.meta["assumed"]
    assert set(said) == {
        cuda_calls.NOTE,
        "all values are finite, and no gradient overflows",
        "a number that is read outside the model is 1",
    }


def test_without_scaler_and_types_it_is_the_trace_of_the_same_step_on_a_cpu():
    def step(device):
        def run(model, tuned, x):
            loss = model.to(device)(x.to(device)).sum() * torch.ones((), device=device)
            loss.backward()
            tuned.step()
            tuned.zero_grad()

        return capture(net, torch.empty(8, 16), optimizer=adam, step=run)

    here, there = step("cpu"), step("cuda:0")
    assert [(op.name, op.kind, op.flops, op.reads, op.writes) for op in here.ops] == [
        (op.name, op.kind, op.flops, op.reads, op.writes) for op in there.ops
    ]
    assert [t.bytes for t in here.tensors] == [t.bytes for t in there.tensors]


@pytest.mark.parametrize(
    "build", [lambda: net().cuda(), lambda: net().to("cuda:1"), lambda: nn.Linear(16, 4, device="cuda")]
)
def test_a_module_may_be_built_on_a_gpu(build):
    trace = capture(build, torch.empty(8, 16), loss=torch.sum)
    assert trace.meta["parameters"] in (16 * 32 + 32 + 32 * 4 + 4, 16 * 4 + 4)


def test_inputs_and_a_reference_may_be_made_on_a_gpu(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(
        "import torch\n\ndef step():\n    x = torch.zeros(8, 16).cuda()\n"
        "    return dict(module=lambda: torch.nn.Linear(16, 4), inputs=lambda: torch.zeros(8, 16, device='cuda'),"
        " loss=torch.sum)\n"
    )
    assert capture_from_reference(f"{file}:step").meta["model"] == "Linear"


def test_nothing_of_it_is_left_after_a_capture():
    before = {name: getattr(torch.cuda, name) for name in (*cuda_calls.ZERO, "synchronize", "Event")}
    step_of("cuda")
    assert before == {name: getattr(torch.cuda, name) for name in before}
    assert torch.zeros(2).to("cpu").device.type == "cpu"


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.rest = nn.Linear(16, 1), nn.Linear(16, 4)

    def forward(self, x):
        scale = self.gate(x).mean()
        if scale.item() > 0:  # the line that is to be named
            return self.rest(x)
        return x


class Selects(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 4)

    def forward(self, x):
        y = self.inner(x)
        return y[y > 0]  # a selection


@pytest.mark.parametrize(
    ("module", "parts"),
    [
        (Skips, ["_local_scalar_dense", "(if scale.item() > 0:", "decides on what is computed", "import a trace"]),
        (Selects, ["(return y[y > 0]", "depends on data", "a mask instead of a selection"]),
    ],
)
def test_what_cannot_be_captured_is_shown_with_its_line_and_a_way_out(module, parts):
    with pytest.raises(WorkloadError) as error:
        capture(lambda: nn.Sequential(module()), torch.empty(8, 16), loss=torch.sum)
    text = str(error.value)
    assert "\n" not in text
    assert "in module '0'" in text
    assert "test_capture_cuda_script.py:" in text
    for part in parts:
        assert part in text


def test_an_error_of_the_step_is_shown_with_its_line():
    def step(model, tuned, x):
        model(x).sum().backward(retain=True)  # no such argument

    with pytest.raises(WorkloadError, match=r"failed at test_capture_cuda_script\.py:\d+ \(model\(x\).*: TypeError"):
        capture(net, torch.empty(8, 16), step=step)

"""Training scripts as people write them for a GPU are captured from the function that holds their step, unedited."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")

from torch import nn  # noqa: E402

from sim import cli, load_profile, simulate  # noqa: E402
from sim.errors import WorkloadError  # noqa: E402
from workloads.capture import capture, capture_from_reference, capture_script  # noqa: E402
from workloads.capturing import asked, making  # noqa: E402

SCRIPTS = Path(__file__).with_name("scripts")
LIBRARIES = ("transformers", "torchvision", "timm", "diffusers", "peft")
FUNCTIONS = {
    # script: function that is or returns the step; parameters; layers; bytes of the optimizer per byte of weights
    "adapters": ("main", 111488, 2, 2),
    "adversarial": ("step", 76800, 15, 2),
    "convnext": ("main", 3377730, 12, 2),
    "dense_network": ("step", 6964106, 7, 2),
    "diffusion": ("main", 774531, 10, 2),
    "digits": ("main", 1199882, 0, 2),
    "efficientnet": ("step", 4020358, 16, 2),
    "image_classification": ("main", 11186772, 8, 1),
    "image_transformer": ("main", 114698, 3, 2),
    "language_model": ("train", 140288, 2, 2),
    "llama_fine_tuning": ("train_one_step", 175040, 3, 2),
    "masked_language_model": ("step", 136756, 2, 2),
    "recurrent": ("main", 99060, 0, 0),
    "segmentation": ("main", 41995850, 21, 1),
    "small_gpt": ("step", 169792, 3, 2),
    "speech_recognition": ("main", 104624, 9, 2),
    "summarisation": ("build", 196864, 4, 0.0305),  # Adafactor's rows and columns
    "text_classification": ("main", 136323, 2, 2),
    "vision_transformer": ("main", 114698, 3, 2),
}
BEYOND = {"detection": "main"}
"""Scripts whose model looks at values that only the person can give: how many boxes are left."""


def imports(script):
    text = (SCRIPTS / f"{script}.py").read_text(encoding="utf-8")
    return [name for name in LIBRARIES if f"import {name}" in text or f"from {name}" in text]


def lane(script):
    missing = [name for name in imports(script) if importlib.util.find_spec(name) is None]
    large = [name for name in imports(script) if name != "transformers"]
    marks = [pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")]
    return pytest.param(script, marks=[*marks, pytest.mark.slow] if large else marks)


def captured(script, function, **options):
    return capture_from_reference(f"{SCRIPTS / script}.py:{function}", **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("script", [lane(script) for script in FUNCTIONS])
def test_a_training_script_is_captured_at_the_first_try(script, capsys):
    function, parameters, layers, states = FUNCTIONS[script]
    trace = captured(script, function)
    meta = trace.meta
    assert capsys.readouterr().out == ""  # what the script prints is not the answer
    assert (meta["parameters"], meta["layers"]) == (parameters, layers)
    assert meta["model_flops"] > 0
    assert "uncounted" not in meta
    assert {"forward", "backward", "update"} <= {op.phase for op in trace.ops}
    trained = {t.name.removesuffix(".grad") for t in trace.tensors if t.role == "gradient" and t.name.endswith(".grad")}
    assert trained <= {t.name for t in trace.tensors if t.role == "weight"}
    kept = [trace.tensors[first] for _, first in trace.carry if trace.tensors[first].role == "optimizer_state"]
    trained_bytes = sum(t.bytes for t in trace.tensors if t.role == "weight" and t.name in trained)
    if states:
        assert sum(t.bytes for t in kept) == pytest.approx(states * trained_bytes, rel=0.02)
    else:
        assert kept == []
    assert simulate(trace, load_profile("a100_40_pcie")).summary()["makespan_ns"] > 0


def test_twenty_scripts_are_tried_and_eighteen_at_least_are_captured():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == {*FUNCTIONS, *BEYOND}
    assert len(FUNCTIONS) + len(BEYOND) == 20
    assert len(FUNCTIONS) >= 18


@pytest.mark.slow
@pytest.mark.parametrize("script", BEYOND)
def test_what_cannot_be_captured_names_the_line_of_the_script(script):
    pytest.importorskip("torchvision")
    with pytest.raises(WorkloadError, match=r"cannot run without data at .*called at detection\.py:\d+ \(losses = "):
        captured(script, BEYOND[script])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_detector_is_captured_where_it_is_said_how_many_boxes_are_kept():
    pytest.importorskip("torchvision")
    few, many = (
        captured("detection", BEYOND["detection"], selected={"generalized_rcnn.py": 0, "*": share})
        for share in (0.25, 0.5)
    )
    assert few.meta["parameters"] == many.meta["parameters"] == 41367656
    assert few.meta["model_flops"] < many.meta["model_flops"]
    assert not {"uncounted"} & {*few.meta, *many.meta}
    assert sum("roi_heads.py" in note for note in many.meta["assumed"]) == 2


# ---- the form of a script ------------------------------------------------------------------------


def write(folder, text):
    (folder / "train.py").write_text(text, encoding="utf-8")
    return f"{folder / 'train.py'}:step"


BASE = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
{more}
def step(batch=8):
    loss = model(torch.randn(batch, 16, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_is_the_same_as_its_description(tmp_path):
    ours = capture_from_reference(write(tmp_path, BASE.format(more="")), {"batch": 4})
    described = capture(
        lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)),
        lambda: torch.randn(4, 16),
        loss=lambda y: y.square().mean(),
        optimizer=torch.optim.AdamW,
    )
    for role in ("weight", "optimizer_state", "gradient"):
        assert [(t.name, t.bytes) for t in ours.tensors if t.role == role] == [
            (t.name, t.bytes) for t in described.tensors if t.role == role
        ]
    assert ours.meta["model_flops"] == described.meta["model_flops"]
    assert ours.meta["samples"] == 4


@pytest.mark.parametrize(
    "more",
    [
        "model = torch.compile(model, mode='max-autotune')",
        "model.compile()",
        "model.half().float().to(memory_format=torch.channels_last)",
        "assert torch.cuda.is_available() and torch.cuda.device_count() == 1",
        "args = __import__('argparse').ArgumentParser().parse_args()",
        "nn.init.trunc_normal_(model[0].weight, std=0.02)",
        "from dataclasses import dataclass\n@dataclass\nclass Config:\n    width: 'int' = 3\n",
    ],
)
def test_what_a_script_does_around_its_step_changes_nothing(tmp_path, more):
    plain = capture_from_reference(write(tmp_path, BASE.format(more="")))
    same = capture_from_reference(write(tmp_path, BASE.format(more=more)))
    assert [(op.name, op.flops) for op in plain.ops] == [(op.name, op.flops) for op in same.ops]
    assert plain.meta["parameters"] == same.meta["parameters"]
    assert (making.COMPILED in same.meta["assumed"]) == ("compile" in more)


AVERAGED = """
import copy, torch
from torch import nn
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(2))).cuda()
optimizer = torch.optim.AdamW(model.parameters())
{made}
def step():
    model(torch.randn(8, 16, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    {updated}
"""
UPDATED = "[mine.data.lerp_(p.data, 0.1) for mine, p in zip(average.parameters(), model.parameters())]"


def test_an_average_beside_the_model_takes_memory_and_is_no_model(tmp_path):
    plain = capture_from_reference(write(tmp_path, AVERAGED.format(made="", updated="")))
    text = AVERAGED.format(made="average = copy.deepcopy(model)", updated=UPDATED)
    both = capture_from_reference(write(tmp_path, text))
    for key in ("parameters", "layers", "model_flops"):
        assert both.meta[key] == plain.meta[key]

    def weights(trace):
        return sum(trace.tensors[first].bytes for _, first in trace.carry if trace.tensors[first].role == "weight")

    assert weights(both) == 2 * weights(plain)  # its statistics, too
    names = {t.name for t in both.tensors if t.role == "weight"}
    assert {"model.0.0.weight", "average.0.0.weight"} <= names


def test_a_script_finds_the_modules_beside_it_and_leaves_none(tmp_path):
    (tmp_path / "beside_the_script.py").write_text("WIDTH = 32\n", encoding="utf-8")
    import sys

    before = list(sys.path)
    capture_from_reference(write(tmp_path, BASE.format(more="from beside_the_script import WIDTH")))
    assert sys.path == before
    assert "captured_reference" not in sys.modules


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def step():\n    return 3\n",
            "no module that was made before .* top level.* `return step`, or a dict with `module`, `inputs`",
        ),
        (  # as a whole script would be put into a function
            "from torch import nn, optim\n\ndef step():\n    net = nn.Linear(2, 2)\n    net.weight.sum().backward()\n"
            "    optim.SGD(net.parameters()).step()\n",
            "with model and optimizer made outside it, at the file's top level",
        ),
        (
            "from torch.nn import Linear\n\ndef step():\n    return Linear(2, 2)\n",
            "returns the module Linear and no training",
        ),
        (BASE.format(more="raise SystemExit('no GPU')"), "SystemExit: no GPU"),
        (BASE.format(more="") + "    raise SystemExit(2)\n", r"failed at train\.py:\d+ \(raise SystemExit\(2\)\)"),
        (BASE.format(more="model[1] = None"), r"failed at train\.py:\d+ \(loss = model"),
    ],
)
def test_what_fails_in_a_script_is_shown_in_one_line(tmp_path, text, message):
    with pytest.raises(WorkloadError, match=message) as error:
        capture_from_reference(write(tmp_path, text))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("drawn", [lambda: torch.randint(8, ()), lambda: torch.randperm(8)[0]])
def test_a_number_that_a_slice_is_made_of_is_the_number_that_was_drawn(drawn):
    def build():
        inner = nn.Linear(16, 4)

        def step():
            start = drawn()
            inner(torch.zeros(64, 16)[start : start + 8]).sum().backward()

        return step

    assert capture_script(build).meta["model_flops"] == 2 * 2 * 8 * 16 * 4  # forward, and the weight's gradient


class Numbers(nn.Module):
    """Its form depends on numbers that it computes with tensors, as that of RegNet does."""

    def __init__(self):
        super().__init__()
        widths = (torch.arange(3) * 2 + torch.tensor([2, 2, 4])).tolist()
        rates = [x.item() for x in torch.linspace(0, 0.5, 3)]
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.parts = nn.ModuleList(nn.Linear(8, width) for width, rate in zip(widths, rates, strict=True) if rate < 0.3)

    def forward(self, x):
        return self.scale * sum(part(x).sum() for part in self.parts)


def test_a_model_may_be_built_by_numbers():
    trace = capture(Numbers, torch.empty(4, 8))
    assert [t.shape for t in trace.tensors if t.role == "weight"] == [(), (2, 8), (2,), (4, 8), (4,)]
    with pytest.raises(WorkloadError, match=r"compiled with torch\.compile"):
        capture(lambda: torch.compile(Numbers()), torch.empty(4, 8))


class Looks(nn.Module):
    """Looks at its labels, chooses by them, and drops a layer at random."""

    def __init__(self, rate=0.1):
        super().__init__()
        self.inner, self.rate = nn.Linear(8, 8), rate

    def forward(self, x, labels):
        if labels.max() >= 8 or (labels < 0).any():
            raise ValueError("labels are out of range")
        if self.training and torch.rand([]) >= self.rate:
            x = self.inner(x)
        return x[labels >= 0].sum() + torch.masked_select(x[:, 0], labels != 0).sum()


def test_a_module_may_look_at_its_labels_and_at_a_random_number():
    def step(rate):
        inputs = (torch.empty(4, 8), torch.empty(4, dtype=torch.int64, device="meta"))
        return capture(lambda: Looks(rate), inputs, kernels="cpu")

    trace = step(0.1)
    assert {asked.BATCH, asked.MEAN} <= set(trace.meta["assumed"])
    shapes = [t.shape for t in trace.tensors if "index.out" in t.name or "masked_select" in t.name]
    assert (4, 8) in shapes
    assert (4,) in shapes
    assert step(0.1).meta["model_flops"] == 3 * 2 * 4 * 8 * 8 - 2 * 4 * 8 * 8  # the batch has no gradient
    with pytest.raises(WorkloadError, match="does not require grad"):
        step(0.9)  # the layer is dropped, and nothing is trained


def test_a_script_is_a_model_like_others(tmp_path, capsys, monkeypatch):
    reference = write(tmp_path, BASE.format(more="print('made')"))
    words = ["tiersim", "run", "--profile", "a100_40_pcie", "--model", reference, "--batch", "4", "--json"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    printed = capsys.readouterr()
    assert json.loads(printed.out)
    assert "made" in printed.err

"""Selections by values: refused in words, or of the size that the person says, as PyTorch's own on such data."""

from __future__ import annotations

import weakref

import pytest

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")

from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from sim import cli  # noqa: E402
from sim.analysis.peak_memory import home_peak  # noqa: E402
from sim.errors import WorkloadError  # noqa: E402
from sim.experiment import simulate  # noqa: E402
from sim.measure.validate import validate  # noqa: E402
from sim.sweeps import StudyError, load_study  # noqa: E402
from tests.validation.oracle import machine  # noqa: E402
from workloads import load_trace  # noqa: E402
from workloads.capture import capture, capture_script  # noqa: E402
from workloads.capturing.selections import chosen  # noqa: E402
from workloads.steps import training_step  # noqa: E402

ROWS, WIDTH = 64, 16


class Proposals(nn.Module):
    """Scores rows, keeps those above zero, and refines them: a detector's second stage in small."""

    def __init__(self, select):
        super().__init__()
        self.score, self.refine, self.select = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 4 * WIDTH), select

    def forward(self, x):
        kept = self.select(x, self.score(x).squeeze(1) > 0)
        return self.refine(kept).relu().square().mean()


def by_mask(x, keep):
    return x[keep]


def by_place(x, keep):
    return x[torch.where(keep)[0]]


def by_nonzero(x, keep):
    return x.index_select(0, keep.nonzero().squeeze(1))


def by_masked_select(x, keep):
    return x.masked_select(keep.unsqueeze(1)).view(-1, WIDTH)


WAYS = [by_mask, by_place, by_nonzero, by_masked_select]


def ready(select):
    """A module, and rows of which one in four has a score above zero."""
    module = Proposals(select)
    with torch.no_grad():
        module.score.weight.fill_(1.0)
        module.score.bias.zero_()
    x = -torch.rand(ROWS, WIDTH)
    x[::4] *= -1
    return module, x


class Live(TorchDispatchMode):
    """The most bytes that live after an op of a real step, beside those that lived before."""

    def __init__(self, before):
        super().__init__()
        self.live, self.most, self.known = 0, 0, {x.untyped_storage()._cdata: None for x in before}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (key := x.untyped_storage()._cdata) not in self.known:
                size = x.untyped_storage().nbytes()
                self.live += size
                self.known[key] = weakref.ref(x.untyped_storage(), lambda _, key=key, size=size: self.free(key, size))
        self.most = max(self.most, self.live)
        return out

    def free(self, key, size):
        del self.known[key]
        self.live -= size


@pytest.mark.parametrize("select", WAYS)
def test_a_step_has_the_peak_of_pytorchs_own_on_such_data(select):
    module, x = ready(select)
    there = [x, *module.parameters()]
    with Live(there) as live:
        module(x).backward()
    trace = capture(lambda: Proposals(select), x, kernels="cpu", selected=0.25)
    start = sum(t.untyped_storage().nbytes() for t in there)
    assert home_peak(simulate(trace, machine()).log) == start + live.most
    assert [note for note in trace.meta["assumed"] if "25 %" in note and "test_capture_selections.py" in note]


@pytest.mark.parametrize("select", WAYS)
def test_without_a_share_the_refusal_names_line_op_module_and_the_way_out(select):
    with pytest.raises(WorkloadError) as refused:
        capture(lambda: Proposals(select), torch.zeros(ROWS, WIDTH))
    text = str(refused.value)
    assert "op aten." in text
    assert "module Proposals" in text
    assert "test_capture_selections.py:" in text
    assert "return x" in text
    assert "selected=" in text


class Branch(nn.Module):
    """Looks whether a condition holds anywhere, everywhere, and how often."""

    def forward(self, x):
        bad = x[:, 0] > 1
        if bad.any():
            x = x * 2
        if bad.all():
            x = x * 3
        return x.mean() * int(bad.sum())


class Named(Branch):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return super().forward(self.inner(x))


@pytest.mark.parametrize(("share", "products"), [(0, 1), (0.5, 2), (1, 3)])
def test_what_is_read_of_a_condition_follows_from_its_share(share, products):
    trace = capture(Named, torch.zeros(ROWS, WIDTH), selected=share)
    names = [name for name in trace.op_columns.name if name.startswith("mul") or ".mul" in name]
    phase = [trace.ops[trace.op_id(name)].phase for name in names]
    assert phase.count("forward") == products


def test_shares_are_by_file_and_line():
    line = by_mask.__code__.co_firstlineno + 1
    rows = {}
    for places in ({f"*selections.py:{line}": 0.5, "*": 0}, {"test_capture_sel*.py": 0.5}, {"other.py": 0, "*": 0.5}):
        trace = capture(lambda: Proposals(by_mask), torch.zeros(ROWS, WIDTH), selected=places)
        rows[str(places)] = [x.shape for x in trace.tensors if x.name.startswith("refine") and x.role == "activation"]
    assert all((ROWS // 2, 4 * WIDTH) in shapes for shapes in rows.values()), rows
    with pytest.raises(WorkloadError, match="cannot run without data"):
        capture(lambda: Proposals(by_mask), torch.zeros(ROWS, WIDTH), selected={"other.py": 0.5})


@pytest.mark.parametrize("wrong", [-0.1, 1.5, True, "half", {"rpn.py": 2}, {3: 0.5}])
def test_a_share_is_from_0_to_1(wrong):
    with pytest.raises(WorkloadError, match="selected: needs a share from 0 to 1"):
        capture(lambda: Proposals(by_mask), torch.zeros(ROWS, WIDTH), selected=wrong)


X = torch.arange(8.0).repeat_interleave(2).view(4, 4)  # half of its values, and all of its rows, differ
SELECTIONS = {
    "nonzero": ("nonzero", torch.ops.aten.nonzero.default, (X > 3.5,), 0.5),
    "index, second axis": ("index", torch.ops.aten.index.Tensor, (X, [None, X[0] > 0]), 0.5),
    "index, two axes": ("index", torch.ops.aten.index.Tensor, (X, [X > 3.5]), 0.5),
    "masked_select": ("masked_select", torch.ops.aten.masked_select.default, (X, X > 3.5), 0.5),
    "unique": ("_unique2", torch.ops.aten._unique2.default, (X, True, True, True), 0.5),
    "unique alone": ("_unique2", torch.ops.aten._unique2.default, (X, True), 0.5),
    "unique rows": ("unique_dim", torch.ops.aten.unique_dim.default, (X, 0, True, True, True), 1.0),
    "runs": ("unique_consecutive", torch.ops.aten.unique_consecutive.default, (X, True, True), 0.5),
    "runs of columns": ("unique_consecutive", torch.ops.aten.unique_consecutive.default, (X, True, True, 1), 0.5),
}


@pytest.mark.parametrize("which", SELECTIONS)
def test_a_selection_has_the_shapes_of_pytorchs(which):
    name, func, args, share = SELECTIONS[which]
    theirs, ours = func(*args), chosen(name, args, share)
    theirs, ours = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (theirs, ours))
    assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in theirs]


def test_no_share_is_asked_of_two_conditions_at_once():
    assert chosen("index", (X, [X[0] > 0, X[0] > 1]), 0.5) is None
    assert chosen("repeat_interleave", (X,), 0.5) is None


SCRIPT = """
import torch
from torch import nn

class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(8, 1)

    def forward(self, x):
        scores = self.score(x).squeeze(1)
        return scores[scores > 0].mean()

def step():
    return {"module": Kept, "inputs": torch.zeros(32, 8)}
"""


def test_the_command_line_takes_shares(tmp_path, capsys, monkeypatch):
    (tmp_path / "kept.py").write_text(SCRIPT, encoding="utf-8")
    out = tmp_path / "kept.jsonl"

    def captured(*selected):
        words = ["tiersim", "trace", "capture", f"{tmp_path / 'kept.py'}:step", "-o", str(out), *selected]
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, capsys.readouterr().err.strip()

    assert captured("--selected", "0.5") == (0, "")
    assert (16,) in {t.shape for t in load_trace(out).tensors}
    assert captured("--selected", "kept.py=0.25,*=0") == (0, "")
    assert (8,) in {t.shape for t in load_trace(out).tensors}
    code, error = captured()
    assert code == 2
    assert "selected=" in error
    code, error = captured("--selected", "rpn.py=much")
    assert code == 2
    assert error.endswith("selected: needs a share from 0 to 1, has 'much'")


STEP = """
import torch

model = torch.nn.Linear(8, 8)


def step(batch=32):
    y = model(torch.randn(batch, 8))
    y[y > 0].sum().backward()
    model.zero_grad()
"""
NOTE = "a condition on values holds for 25 % of them, as said of kept.py:9"


def said(capsys, monkeypatch, *words):
    """What a command prints, its error and its exit status."""
    monkeypatch.setattr("sys.argv", ["tiersim", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    return printed.out, printed.err.strip(), ended.value.code


@pytest.mark.parametrize("command", [("run",), ("compare", "--policies", "keep_all,dtr")])
def test_commands_that_name_a_model_take_shares_and_say_so(tmp_path, capsys, monkeypatch, command):
    (tmp_path / "kept.py").write_text(STEP, encoding="utf-8")
    words = (*command, "--profile", "a100_40_pcie", "--model", f"{tmp_path / 'kept.py'}:step")
    out, error, code = said(capsys, monkeypatch, *words, "--selected", "kept.py:9=0.25")
    assert (error, code) == ("", 0)
    assert NOTE in out
    out, error, code = said(capsys, monkeypatch, *words)
    assert code == 2
    assert "--selected" in error
    out, error, code = said(capsys, monkeypatch, *words, "--selected", "kept.py=0.5,kept.py=1")
    assert (error, code) == ("tiersim: selected: 'kept.py' is given twice", 2)
    out, error, code = said(capsys, monkeypatch, *words, "--selected", "25 %")
    assert (error, code) == ("tiersim: selected: needs a share from 0 to 1, has '25 %'", 2)


def test_the_share_that_was_given_is_that_of_the_trace(tmp_path):
    (tmp_path / "kept.py").write_text(STEP, encoding="utf-8")
    model = f"{tmp_path / 'kept.py'}:step"
    kept = [
        max(t.shape for t in training_step(model, selected=share).tensors if len(t.shape or ()) == 1 and t.bytes > 32)
        for share in ("0.25", 0.5, {"kept.py": 0.75})
    ]
    assert kept == [(64,), (128,), (192,)]


def test_a_model_that_selects_nothing_takes_no_share():
    with pytest.raises(WorkloadError, match="selected: gpt2-small is built in and selects nothing by values"):
        training_step("gpt2-small", batch=1, sequence=8, selected=0.5)
    with pytest.raises(WorkloadError, match="selected: this model is run, not captured"):
        validate(selected=0.5)


def test_studies_take_shares():
    study = {"model": "gpt2-small", "profile": "a100_40_pcie", "policy": "keep_all"}
    with pytest.raises(StudyError, match=r"selected\[1\]: needs a share from 0 to 1, has 2"):
        load_study({**study, "selected": [0.5, 2]})
    cells = load_study({**study, "selected": [0.5, "rpn.py=0.25"]}).cells()
    assert [cell.task["workload"]["selected"] for cell in cells] == [0.5, "rpn.py=0.25"]


class Largest(nn.Module):
    def forward(self, x):
        return x[: int(x.abs().max())].mean()


class Jagged(nn.Module):
    def forward(self, x):
        rows = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
        return rows.values().mean()


class FromJagged(nn.Module):
    def forward(self, x):
        rows = torch.nested.nested_tensor_from_jagged(x[0], torch.tensor([0, 2, 6]))
        return rows.values().mean()


@pytest.mark.parametrize(("kind", "op"), [(Jagged, "nested_tensor"), (FromJagged, "nested_tensor_from_jagged")])
def test_jagged_tensors_are_refused_with_the_op_the_module_the_line_and_a_way_out(kind, op):
    with pytest.raises(
        WorkloadError, match=rf"^op {op} in module '1' cannot run without data at .*\.py:\d+ \(rows = "
    ) as e:
        capture(lambda: nn.Sequential(nn.Linear(8, 8), kind()), torch.zeros(4, 6, 8), selected=0.5)
    assert "nested tensor (torch.nested) depend on data: capture a variant with padded tensors and a mask" in str(
        e.value
    )


def test_lazy_modules_of_a_script_are_refused_with_the_line_and_a_way_out():
    def build():
        model = nn.Sequential(nn.Flatten(), nn.LazyLinear(4))
        return lambda: model(torch.zeros(2, 3, 3)).sum().backward()

    with pytest.raises(WorkloadError, match=r"nn\.LazyLinear\(4\).*: give them \(nn\.Linear for nn\.LazyLinear\)"):
        capture_script(build)


class Top(nn.Module):
    """As many of the largest as are above zero."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, x):
        y = self.line(x).flatten()
        return torch.topk(y, int((y > 0).sum())).values.sum()


def test_how_many_of_the_largest_are_taken_is_the_share_that_is_said():
    with pytest.raises(WorkloadError, match=r"topk\(y, int\(\(y > 0\)\.sum\(\)\)"):
        capture(Top, torch.zeros(16, 8))
    trace = capture(Top, torch.zeros(16, 8), selected=0.25)
    (op,) = (op for op in trace.ops if ".topk" in f".{op.name}" and op.phase == "forward")
    assert trace.tensors[op.writes[0]].shape == (32,)  # a quarter of 128
    (note,) = trace.meta["assumed"]
    assert note.startswith("a condition on values holds for 25 % of them, as said of test_capture_selections.py")


def test_a_share_is_named_as_the_way_out_only_where_it_is_one():
    for selected in (None, 0.5):
        with pytest.raises(WorkloadError, match=r"cannot run without data at test_capture_selections\.py") as refused:
            capture(Largest, torch.zeros(4, 6, 8), selected=selected)
        assert "in which that is fixed" in str(refused.value)
        assert "selected=" not in str(refused.value)

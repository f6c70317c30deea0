"""What Python locals hold in a captured model: it counts as memory, and joins no ops."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="capturing needs PyTorch: pip install 'tiersim[torch]'")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from sim.analysis.peak_memory import peak_memory  # noqa: E402
from sim.experiment import reference_run, simulate  # noqa: E402
from sim.hardware.profile import load_profile  # noqa: E402
from sim.trace.chain import chain  # noqa: E402
from tests.workloads.hugging_face import ForCausalLM  # noqa: E402
from workloads.capture import capture  # noqa: E402

LAYERS = 12


@pytest.fixture(scope="module")
def decoder():
    return capture(
        lambda: ForCausalLM(LAYERS),
        torch.zeros(4, 64, dtype=torch.int64, device="meta"),
        targets=torch.zeros(256, dtype=torch.int64, device="meta"),
        loss=functional.cross_entropy,
    )


def names(trace, tensors):
    return [trace.tensor_columns.name[t] for t in tensors]


def test_a_local_is_released_and_not_read():
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x):
            kept = self.first(x)  # stays until this returns
            y = torch.relu(kept + 1.0)
            return self.third(self.second(y)).sum()

    trace = capture(Local, torch.zeros(4, 8))
    held = {trace.tensor_columns.name[t]: op for op in trace.ops for t in op.releases}
    op = held["first.mm.out"]
    assert op.name == "sum"
    kept = trace.tensor_id("first.mm.out")
    assert kept not in op.reads
    assert [trace.ops[r].name for r in trace.readers(kept)] == ["add"]


class Named(nn.Module):
    """A variable of forward holds what autograd saves, too."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        named = self.first(x).relu()
        return self.third(self.second(named).relu()).square().sum()


def let_go(trace):
    return {trace.tensor_columns.name[t]: op.name for op in trace.ops for t in op.unbinds}


def test_variables_let_go_of_what_autograd_holds():
    trace = capture(Named, torch.zeros(4, 8))
    assert let_go(trace) == {"relu.out": "sum"}  # not what has no name, and not what is used by the last op itself
    assert let_go(capture(Named, torch.zeros(4, 8), warm_up=0)) == {}
    assert let_go(capture(Named, torch.zeros(4, 8), warm_up=2)) == let_go(trace)


def test_a_step_that_differentiates_twice_is_captured_as_it_is():
    """Its second derivative needs what autograd saves."""

    def penalised(model, tuned, x):
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        tuned.step()
        tuned.zero_grad()

    trace = capture(Named, torch.zeros(4, 8), step=penalised, optimizer=torch.optim.Adam)
    assert let_go(trace) == {}
    updated = {name.partition(".exp_avg")[0] for name in trace.tensor_columns.name if ".exp_avg" in name}
    assert {"first.weight", "second.weight", "third.weight"} <= updated


def test_an_iteration_that_needs_what_is_saved_runs_again():
    class Identical(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = x
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert ctx.saved_tensors[0].data_ptr is not None
            assert ctx.saved_tensors[0].untyped_storage()._cdata == ctx.kept.untyped_storage()._cdata
            return grad * 2

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(8, 8)

        def forward(self, x):
            return Identical.apply(self.line(x)).sum()

    trace = capture(Model, torch.zeros(4, 8))
    assert [op.name for op in trace.ops if op.phase == "forward"] == ["line.addmm", "mul", "sum"]


def test_a_module_that_is_made_where_it_is_called_belongs_to_the_module_that_calls_it():
    """As ACT2FN of Hugging Face's Mamba 2."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(8, 8)

        def forward(self, x):
            return nn.SiLU()(self.line(x))

    trace = capture(lambda: nn.Sequential(Block(), Block()), torch.zeros(4, 8), loss=lambda x: x.sum())
    silu = [(op.name, op.layer) for op in trace.ops if ".silu" in op.name and op.phase == "forward"]
    assert silu == [("0.SiLU.silu", 0), ("1.SiLU.silu", 1)]


def test_a_decoder_with_locals_is_the_chain_that_it_is(decoder):
    """Two residual sums a layer; before them the embedding, behind them the norm, the head and the loss."""
    line = chain(decoder, [1] * len(decoder.ops))
    ends = [decoder.op_columns.name[stage.forward[-1]] for stage in line.stages]
    assert ends[0] == "model.embed_tokens.embedding"
    assert ends[1 : 2 * LAYERS + 1] == [f"model.layers.{i}.{add}" for i in range(LAYERS) for add in ("add", "add.2")]
    assert len(line) >= 2 * LAYERS + 3
    assert any(decoder.released[t] > decoder.last_use[t] for t in range(len(decoder.tensors)))


@pytest.mark.parametrize(("policy", "percent"), [("full_recompute", 40), ("rotor", 30), ("chen", 60), ("dtr", 40)])
def test_recomputation_works_on_it(decoder, policy, percent):
    platform = load_profile("a100_80_sxm")
    log = reference_run(decoder, platform)
    plain = peak_memory(log).bytes
    result = simulate(decoder, platform, policy, budget=plain * percent // 100)
    assert peak_memory(result.log).bytes <= plain * percent // 100
    assert result.log.end < 1.5 * log.end

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

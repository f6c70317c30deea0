"""Steps captured from PyTorch as pipeline stages: each updates its own weights, and sends activations alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from sim.errors import LayoutError
from sim.layout import check_experts, lay_out
from sim.rewrites.slots import slots_of
from sim.rewrites.values import departures
from sim.trace import Trace
from sim.trace.origin import Slots

torch = pytest.importorskip("torch")

BATCH, SEQUENCE, WIDTH, LAYERS = 2, 16, 32, 4
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
OPTIMIZERS = {"adamw_foreach": 2, "adamw_fused": 2, "adamw_loop": 2, "sgd_momentum": 1, "sgd": 0}
"""States per parameter."""


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def llama(optimizer: str) -> Trace:
    pytest.importorskip("transformers")
    from workloads.hugging_face import hugging_face

    return hugging_face(LLAMA, "small", "small", batch=BATCH, sequence=SEQUENCE, optimizer=optimizer)


def clipped(*, foreach: bool) -> Trace:
    """A step that divides gradients by the norm of all of them."""
    from workloads import capture

    def step(model, tuned, x):
        model(x).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        tuned.step()
        tuned.zero_grad()

    def adamw(parameters):
        return torch.optim.AdamW(parameters, foreach=foreach)

    return capture(Blocks, (torch.empty(BATCH, WIDTH),), step=step, optimizer=adamw)


def sent(trace: Trace) -> Counter[tuple[str, int]]:
    """Bytes by phase and the device that sends them."""
    found: Counter[tuple[str, int]] = Counter()
    for op in trace.ops:
        if op.kind == "send":
            found[op.phase, op.device] += sum(trace.tensors[t].bytes for t in op.reads)
    return found


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stages_exchange_activations_and_their_gradients_alone(optimizer: str, stages: int) -> None:
    base = llama(optimizer)
    trace, _ = lay_out(base, "a100_80_sxm", {"pp": stages})
    border = 4 * BATCH * SEQUENCE * WIDTH
    forward = {("forward", s): border for s in range(stages - 1)}
    assert sent(trace) == {**forward, **{("backward", s): border for s in range(1, stages)}}
    assert {each.what for each in departures(trace, base)} <= {"repeated"}  # rotary tables, by each stage itself


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_stage_reads_and_writes_the_states_of_its_own_layers(optimizer: str) -> None:
    trace, _ = lay_out(llama(optimizer), "a100_80_sxm", {"pp": 2})
    h, inner, kv = WIDTH, 48, WIDTH // 2
    layer = 2 * h * h + 2 * h * kv + 3 * h * inner + 2 * h
    parameters = 2 * layer + 64 * h, 2 * layer + h + 64 * h  # the embedding; the last norm and the head
    states = [0, 0]
    seen: set[int] = set()
    for op in trace.ops:
        for t in op.reads:
            tensor = trace.tensors[t]
            if tensor.role == "optimizer_state" and trace.producer[t] < 0 and t not in seen and tensor.shape != ():
                seen.add(t)
                states[op.device] += tensor.bytes
    assert tuple(states) == tuple(4 * OPTIMIZERS[optimizer] * n for n in parameters)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("foreach", [True, False])
def test_a_norm_of_all_gradients_is_gathered_and_what_follows_of_it_is_sent_back(foreach: bool, stages: int) -> None:
    """Four scalars of each layer go to the first stage, one comes back to each other stage."""
    base = clipped(foreach=foreach)
    trace, _ = lay_out(base, "a100_80_sxm", {"pp": stages})
    border, norms = 4 * BATCH * WIDTH, 4 * 4 * LAYERS // stages
    expected = {("update", s): norms for s in range(1, stages)} | {("update", 0): 4 * (stages - 1)}
    expected |= {("forward", s): border for s in range(stages - 1)}
    assert sent(trace) == expected | {("backward", s): border for s in range(1, stages)}
    assert departures(trace, base) == ()


class Experts(torch.nn.Module):
    """A mixture whose experts run one after another, as the library has it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = torch.nn.Linear(WIDTH, 2)
        self.experts = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        chosen, out = weights.argmax(-1), x
        for k, expert in enumerate(self.experts):
            rows = torch.where(chosen == k)[0]
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, k, None])
        return out.sum()


def test_a_captured_mixture_says_what_it_lacks_to_be_divided_by_experts() -> None:
    from workloads import capture

    trace = capture(Experts, (torch.empty(16, WIDTH),), selected=0.5, optimizer=torch.optim.AdamW)
    said = r"ep: 'experts.0.up.weight' is of an expert, but the trace does not say how many rows each .*, nor which ops"
    with pytest.raises(LayoutError, match=said):
        check_experts(trace, 2)


def test_a_step_on_the_way_that_reads_another_parameters_is_wrong() -> None:
    base = clipped(foreach=True)
    trace, _ = lay_out(base, "a100_80_sxm", {"pp": 2})
    assert trace.origin is not None
    ops = list(trace.origin.ops)
    divided = next(i for i, op in enumerate(trace.ops) if op.name.startswith("_foreach_div_"))
    expr = ops[divided]
    assert isinstance(expr, Slots)
    assert len(slots_of(base, expr.of.id)) == expr.count == 4 * LAYERS
    ops[divided] = Slots(expr.of, tuple(k for k in range(expr.count) if k not in expr.slots), expr.count)
    trace.origin = replace(trace.origin, ops=tuple(ops))
    assert "wrong" in {each.what for each in departures(trace, base)}

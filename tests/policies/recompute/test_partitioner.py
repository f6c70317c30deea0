"""`min_cut` and `sac_knapsack` against PyTorch's own partitioner: the same joint graphs, budgets from 1 to 0."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from sim.conformance.checker import check  # noqa: E402
from sim.experiment import problem_for  # noqa: E402
from sim.hardware.platform import Engine, Platform, Tier  # noqa: E402
from sim.plan import Recompute  # noqa: E402
from sim.policies.recompute.min_cut import MinCut  # noqa: E402
from sim.policies.recompute.sac_knapsack import SacKnapsack  # noqa: E402
from sim.solvers.cuts import Cuts  # noqa: E402
from sim.solvers.joint_graph import INTENSIVE  # noqa: E402
from sim.solvers.partition import Bans  # noqa: E402

from .fx_joint import as_trace, joint  # noqa: E402

BUDGETS = (1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0)


class Mlp(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        sizes = (64, 256, 64, 192, 32, 128, 16)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.dropout = dropout

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            x = F.relu(x) if i % 2 else F.gelu(x) * torch.sigmoid(x)
            x = F.dropout(x, self.dropout, True) if self.dropout else x
        return (x.square().mean(),)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, fused: bool):
        super().__init__()
        self.heads, self.dropout, self.fused = heads, dropout, fused
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def drop(self, x):
        return F.dropout(x, self.dropout, True) if self.dropout else x

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = (one.view(b, s, self.heads, -1).transpose(1, 2) for one in self.qkv(self.norms[0](x)).split(w, dim=2))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(w // self.heads)
            scores = scores.masked_fill(torch.ones(s, s).tril() == 0, float("-inf"))
            y = self.drop(scores.softmax(-1)) @ v
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(b, s, w)))
        return x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh")))


class Gpt(nn.Module):
    def __init__(self, layers: int = 2, width: int = 64, vocab: int = 101, dropout: float = 0.0, fused: bool = False):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, 4, dropout, fused) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.wte.weight.t()
        return (F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.reshape(-1)),)


class Llama(nn.Module):
    def __init__(self, layers: int = 3, width: int = 48, heads: int = 4):
        super().__init__()
        self.layers = nn.ModuleList()
        self.heads = heads
        for _ in range(layers):
            names = {"q": width, "k": width // 2, "v": width // 2, "o": width, "gate": 3 * width, "up": 3 * width}
            one = nn.ModuleDict({name: nn.Linear(width, size, bias=False) for name, size in names.items()})
            one["down"] = nn.Linear(3 * width, width, bias=False)
            one["norm1"], one["norm2"] = nn.RMSNorm(width), nn.RMSNorm(width)
            self.layers.append(one)

    def rotate(self, x):
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[-2])[:, None] / 10_000 ** (torch.arange(half) / half)
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    def forward(self, x):
        b, s, w = x.shape
        for one in self.layers:
            y = one["norm1"](x)
            q = self.rotate(one["q"](y).view(b, s, self.heads, -1).transpose(1, 2))
            k, v = (one[n](y).view(b, s, self.heads // 2, -1).transpose(1, 2) for n in "kv")
            k, v = (t.repeat_interleave(2, 1) for t in (self.rotate(k), v))
            scores = (q @ k.transpose(-2, -1) / math.sqrt(w // self.heads)).softmax(-1)
            x = x + one["o"]((scores @ v).transpose(1, 2).reshape(b, s, w))
            y = one["norm2"](x)
            x = x + one["down"](F.silu(one["gate"](y)) * one["up"](y))
        return (x.pow(2).mean(),)


class Cnn(nn.Module):
    def __init__(self, norm: bool = True):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=not norm) for _ in range(4))
        self.norms = nn.ModuleList(nn.GroupNorm(2, 8) if norm else nn.Identity() for _ in range(4))
        self.head = nn.Linear(8 * 16, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        for i in range(0, 4, 2):
            y = F.relu(self.norms[i](self.convs[i](x)))
            x = F.relu(self.norms[i + 1](self.convs[i + 1](y)) + x)
        x = F.avg_pool2d(x, 2)
        return (F.cross_entropy(self.head(x.flatten(1)), torch.zeros(x.shape[0], dtype=torch.long)),)


class Chain(nn.Module):
    """130 pointwise ops in a row; a value used at both ends of a product; a sum over rows; a sort; a plain product."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = self.first(x)
        near = torch.sin(x)
        for _ in range(65):
            x = torch.cos(x) * 1.01
        x = x * x.exp().sum(-1, keepdim=True)
        x = x.cumsum(0).tanh()
        y = self.last(torch.sigmoid(x) * near)
        return ((torch.sin(y) * torch.exp(near).cos() * y.sin()).sum(),)


class Spare(nn.Module):
    """Parameters, a buffer and an input that no op reads; a shared and a frozen weight; a buffer that is updated."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.reruns = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 64)
        self.reruns.weight = self.up.weight
        self.down.requires_grad_(False)
        self.idle, self.small = nn.Linear(200, 30), nn.Parameter(torch.zeros(1000))
        self.register_buffer("table", torch.zeros(300))
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, x, unused):
        x = F.dropout(F.gelu(self.up(x)), 0.2)
        self.seen.mul_(0.9).add_(x.detach().mean(0))
        x = self.down(x).mul_(2).relu_()
        y = self.reruns(x).tanh() * F.dropout(self.seen * x.repeat(1, 2), 0.3)
        return (y.square().mean(), y.view(-1)[:40], x.t())


def ids():
    return torch.zeros(2, 32, dtype=torch.long)


CASES = {
    "mlp": lambda **o: joint(Mlp(), torch.randn(32, 64), **o),
    "mlp with dropout": lambda **o: joint(Mlp(0.1), torch.randn(32, 64), **o),
    "gpt": lambda **o: joint(Gpt(), ids(), **o),
    "gpt with dropout": lambda **o: joint(Gpt(layers=1, dropout=0.1), ids(), **o),
    "gpt, fused attention": lambda **o: joint(Gpt(layers=3, fused=True), ids(), **o),
    "llama": lambda **o: joint(Llama(), torch.randn(2, 24, 48), **o),
    "cnn": lambda **o: joint(Cnn(norm=False), torch.randn(4, 3, 16, 16), **o),
    "cnn with norms": lambda **o: joint(Cnn(), torch.randn(4, 3, 16, 16), **o),
    "what nothing reads": lambda **o: joint(Spare(), torch.randn(48, 32), torch.randn(70, 3), **o),
    "bans": lambda **o: joint(Chain(), torch.randn(64, 32), **o),
}


@cache
def graph_of(case, **options):
    """The graph of a case; several tests ask for the same."""
    return CASES[case](**options)


QUICK = {
    ("what nothing reads", True),
    ("what nothing reads", False),
    ("mlp", True),
    ("mlp with dropout", False),
    ("gpt with dropout", True),
    ("cnn", True),
}


def problem(trace):
    tier = Tier("hbm", 1 << 40, 1 << 40, 10**9, device=0)
    engine = Engine("npu", 0, "hbm", ("hbm",), {"fp32": 10**12})
    return problem_for(trace, Platform("toy", (tier,), (engine,), ()))


def ours(policy, asked, computed):
    """Bytes kept, and the ops that the plan recomputes of those that PyTorch computes in forward."""
    plan = policy.plan(asked)
    again = [asked.trace.op_columns.name[a.op] for a in plan.actions if isinstance(a, Recompute)]
    assert len(again) == len(set(again))
    return plan.notes["kept_bytes"], set(again) & computed


def agrees(graph, policies=BUDGETS, options=None, **parameters):
    asked = problem(as_trace(graph))
    seen = set()
    for budget in policies:
        saved, again, computed, bytes = graph.partition(budget, **(options or {}))
        policy = SacKnapsack(memory_budget=budget, regions="graph", **parameters)
        assert ours(policy, asked, computed) == (bytes, again), budget
        cuts = Cuts(asked, "test", regions="graph", runtimes=parameters.get("runtime", "flops"))
        kept = set(cuts.saved(budget, parameters.get("knapsack", "dp")).kept)
        kept |= {t for op in cuts.joint.backward for t in cuts.index.reads[op] if cuts.index.producer[t] < 0}
        names = {asked.trace.tensor_columns.name[t].removesuffix(".out") for t in kept}
        assert {name for name in names if "tangents" not in name} == saved, budget
        seen.add((bytes, frozenset(again)))
        if budget == 1:
            assert ours(MinCut(), asked, computed) == (bytes, again)
    return len(seen)


def cases():
    """Each model on both graphs; the quick ones on every run of the tests, the rest with the slow tests."""
    for case in sorted(CASES.keys() - {"bans"}):
        for decomposed in (True, False):
            marks = () if (case, decomposed) in QUICK else pytest.mark.slow
            yield pytest.param(case, decomposed, marks=marks, id=f"{case}, {'inductor' if decomposed else 'aten'}")


@pytest.mark.parametrize(("case", "decomposed"), list(cases()))
def test_saves_and_recomputes_what_pytorch_does_at_every_budget(case, decomposed):
    assert agrees(graph_of(case, decomposed=decomposed)) >= 3


@pytest.mark.parametrize(
    ("case", "decomposed"),
    [("gpt with dropout", True), ("cnn", True), pytest.param("llama", False, marks=pytest.mark.slow)],
)
def test_without_views_the_same_products_are_recomputed_and_nearly_the_same_bytes_kept(case, decomposed):
    """A value is fewer steps from backward where views are no nodes, so that ties may go another way."""
    graph = graph_of(case, decomposed=decomposed)
    asked = problem(as_trace(graph, fold=True))
    kind = {op.name: op.kind for op in asked.trace.ops}
    default = graph.partition(1)[3]
    for budget in BUDGETS:
        _, again, computed, bytes = graph.partition(budget)
        kept, ops = ours(SacKnapsack(memory_budget=budget, regions="graph"), asked, computed)
        assert kept == pytest.approx(bytes, abs=0.04 * default), budget
        assert {op for op in ops if kind[op] in INTENSIVE} == {op for op in again if kind.get(op) in INTENSIVE}
        plan = SacKnapsack(memory_budget=budget, regions="graph").plan(asked)
        assert asked.evaluate(plan).end == check(plan, asked.cost.op_ns).time  # legal, and nothing runs unasked


@pytest.mark.parametrize(("solver", "estimator"), [("greedy", "flops"), ("ilp", "flops"), ("dp", "testing")])
def test_other_solvers_and_costs_choose_as_pytorchs(solver, estimator):
    options = {"activation_memory_budget_solver": solver, "activation_memory_budget_runtime_estimator": estimator}
    graph = graph_of("mlp with dropout", decomposed=False)
    assert agrees(graph, (0.6, 0.4, 0.25, 0.1), options, knapsack=solver, runtime=estimator) >= 3


@pytest.mark.parametrize("case", ["mlp", "what nothing reads"])
def test_parameters_that_are_not_free_weigh_as_inputs_do(case):
    agrees(graph_of(case, static=False), (1, 0.5, 0.1))


@pytest.mark.parametrize("case", ["mlp with dropout", pytest.param("gpt", marks=pytest.mark.slow)])
def test_aggressive_recomputation_is_pytorchs(case):
    graph = graph_of(case, decomposed=False)
    asked = problem(as_trace(graph))
    _, again, computed, bytes = graph.partition(1, aggressive_recomputation=True)
    assert ours(MinCut(aggressive=True), asked, computed) == (bytes, again)
    assert bytes < graph.partition(1)[3]


BANS = {
    "used_far_apart": "ban_recompute_used_far_apart",
    "long_chains": "ban_recompute_long_fusible_chains",
    "materialized": "ban_recompute_materialized_backward",
    "unlisted": "ban_recompute_not_in_allowlist",
    "reductions": "ban_recompute_reductions",
}


@pytest.mark.parametrize("ban", BANS)
def test_each_ban_alone_is_pytorchs(ban):
    """A net in which each of them changes the cut."""
    graph = graph_of("bans", decomposed=False)
    asked = problem(as_trace(graph))
    off = {name: False for name in BANS if name != ban}
    theirs = {BANS[name]: value for name, value in off.items()}
    saved = Cuts(asked, "test", regions="graph", bans=Bans(**off)).saved()
    _, again, computed, bytes = graph.partition(1, **theirs)
    names = asked.trace.op_columns.name
    assert (saved.bytes, {names[op] for op in saved.reruns} & computed) == (bytes, again)
    _, again_without, _, bytes_without = graph.partition(1, **theirs, **{BANS[ban]: False})
    assert (bytes, again) != (bytes_without, again_without)


def test_compiled_stack_of_a_captured_model_saves_what_pytorch_does():
    """The trace is that of eager kernels; PyTorch cuts its own decomposition of the same model."""
    from workloads import capture, with_stack

    trace = capture(Mlp, (torch.randn(32, 64),), loss=lambda result: result[0])
    kept = []
    for one in (trace, with_stack(trace, "compiled")):
        made = {t for op in one.ops if op.phase == "forward" for t in op.writes}
        read = {t for op in one.ops if op.phase == "backward" for t in op.reads}
        kept.append(sum(one.tensors[t].bytes for t in made & read))
    truth = graph_of("mlp", decomposed=True).partition(1)[3]
    assert kept[1] == pytest.approx(truth, rel=0.01)
    assert kept[0] > 1.5 * truth

"""A plan exported for PyTorch: its tracker's peak is the simulated one, losses and gradients are the plain run's."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed._tools import mem_tracker  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from sim import Drop, Plan, Policy, Recompute, export, simulate  # noqa: E402
from sim.analysis.peak_memory import home_peak  # noqa: E402
from sim.applying.meaning import meaning_of  # noqa: E402
from sim.hardware.platform import Link  # noqa: E402
from sim.units import format_bytes  # noqa: E402
from tests.applying import models  # noqa: E402
from tests.applying.models import MODELS, module_from, trained  # noqa: E402
from tests.validation.oracle import machine  # noqa: E402
from workloads import transformer  # noqa: E402
from workloads.steps import training_step  # noqa: E402

trace_of = cache(models.trace_of)


def stepped(model, x):
    """A step of a model, run once, so that the optimizer has its state; and that optimizer."""
    tuned = models.SGD(model.parameters())

    def step():
        model(x).backward()
        tuned.step()
        tuned.zero_grad()

    step()
    return step, tuned


def tracked(name, apply, monkeypatch, host=False):
    """The peak of PyTorch's own tracker for a step under fake tensors, sizes not rounded; with that of the host."""
    monkeypatch.setattr(mem_tracker._WeakRefInfo, "_calculate_mem_consumed", lambda self: self.size * self.element_size)
    make, shape = MODELS[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = apply(make())
        x = torch.zeros(shape, dtype=torch.int64 if models.is_language(name) else torch.float32)
        step, tuned = stepped(model, x)
        tracker = mem_tracker.MemTracker()
        tracker.track_external(model, x, tuned)
        with tracker:
            step()
    peaks = {kind.type: each[mem_tracker._TOTAL_KEY] for kind, each in tracker.get_tracker_snapshot("peak").items()}
    assert (peaks.keys() == {"cpu"}) or host
    return (peaks["cpu"], peaks["meta"]) if host else peaks["cpu"]


def exported(name, policy, share=None, **options):
    trace = trace_of(name)
    budget = None if share is None else int(share * home_peak(simulate(trace, machine()).log))
    return export(simulate(trace, machine(), policy, budget=budget, **options), "torch")


def same_values(name, apply):
    plain_loss, plain = trained(name, lambda model: model)
    loss, gradients = trained(name, apply)
    assert torch.equal(loss, plain_loss)
    assert gradients.keys() == plain.keys()
    assert all(torch.equal(gradients[key], plain[key]) for key in plain)


class Storages(TorchDispatchMode):
    """The peak of the bytes of all storages that are alive, counted op by op: what `MemTracker` gets wrong for layers
    that are called again on another input."""

    def __init__(self, *known):
        super().__init__()
        self.alive, self.peak = {}, 0
        self.note(known)

    def note(self, tensors):
        for t in tensors:
            storage = t.untyped_storage()
            self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.alive = {key: each for key, each in self.alive.items() if not each[0].expired()}
        results = op(*args, **(kwargs or {}))
        self.note(t for t in tree_leaves(results) if isinstance(t, torch.Tensor))
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return results


def peak_of_storages(name, apply):
    model, x = apply(MODELS[name][0]()), models.batch(name)
    step, tuned = stepped(model, x)
    states = [t for state in tuned.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    with Storages(x, *model.parameters(), *states) as found:
        step()
    return found.peak


@pytest.mark.parametrize("name", [name for name in MODELS if name != "siamese"])
def test_checkpoints_round_layers_hold_what_pytorchs_tracker_shows(name, monkeypatch):
    found = exported(name, "full_recompute")
    stateful = any(isinstance(module, torch.nn.BatchNorm2d) for module in MODELS[name][0]().modules())
    assert [line for line in found.differences if "running statistics" not in line] == []
    assert bool(found.differences) == stateful
    assert found.cost == found.planned
    assert tracked(name, module_from(found.text).apply, monkeypatch) == pytest.approx(found.cost.peak_bytes, rel=0.01)
    same_values(name, module_from(found.text).apply)


def test_running_statistics_that_are_updated_twice_are_a_difference_that_is_told():
    for policy, told in (("full_recompute", True), ("keep_all", False)):
        found = exported("residual net", policy)
        assert any("running statistics once more" in line for line in found.differences) == told
        kept = []
        for apply in (lambda model: model, module_from(found.text).apply):
            torch.manual_seed(0)
            model = apply(MODELS["residual net"][0]())
            model(models.batch("residual net")).backward()
            kept.append([buffer.clone() for buffer in model.buffers()])
        assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True)) != told


SELECTIVE = [
    ("gpt2", "selective_recompute", None),
    ("gpt2, eager", "dtr", 0.9),
    ("llama", "sac_knapsack", 0.9),
    ("encoder", "selective_recompute", None),
    ("mixer", "selective_recompute", None),
    ("attention net", "sac_knapsack", 0.9),
    ("residual net", "selective_recompute", None),
    ("einsum", "selective_recompute", None),
]


@pytest.mark.parametrize(("name", "policy", "share"), SELECTIVE)
def test_what_was_kept_in_a_layer_is_kept_by_a_selective_checkpoint(name, policy, share, monkeypatch):
    found = exported(name, policy, share)
    file = module_from(found.text)
    assert any("save" in entry for entry in file.PLAN)
    assert tracked(name, file.apply, monkeypatch) == pytest.approx(found.cost.peak_bytes, rel=0.01)
    same_values(name, file.apply)


SEVERAL = [("mlp", "every_k", {"k": 2}), ("gpt2", "every_k", {}), ("encoder", "every_k", {})]


@pytest.mark.parametrize(("name", "policy", "options"), SEVERAL)
def test_layers_of_one_sweep_are_under_one_checkpoint(name, policy, options, monkeypatch):
    found = exported(name, policy, **options)
    file = module_from(found.text)
    assert any(len(entry["modules"]) > 1 for entry in file.PLAN)
    assert tracked(name, file.apply, monkeypatch) == pytest.approx(found.cost.peak_bytes, rel=0.01)
    same_values(name, file.apply)


NESTED = [
    ("deep mlp", "revolve", {"slots": 2}),
    ("deep mlp", "revolve", {"slots": 3}),
    ("gpt2", "revolve", {"slots": 2}),
    ("llama", "revolve", {"slots": 2}),
    ("residual net", "revolve", {"slots": 2}),
]


def depth(entries):
    """How many checkpoints are round the module that is in most of them."""
    return max(sum(path in entry["modules"] for entry in entries) for each in entries for path in each["modules"])


@pytest.mark.parametrize(("name", "policy", "options"), NESTED)
def test_what_is_recomputed_several_times_is_under_checkpoints_inside_one_another(name, policy, options, monkeypatch):
    found = exported(name, policy, **options)
    file = module_from(found.text)
    assert depth(file.PLAN) > 1
    assert tracked(name, file.apply, monkeypatch) == found.cost.peak_bytes
    same_values(name, file.apply)


def test_a_module_runs_as_often_as_checkpoints_are_round_it_and_once_more():
    file = module_from(exported("deep mlp", "revolve", slots=2).text)
    model, runs = MODELS["deep mlp"][0](), {}
    for k, block in enumerate(model.blocks):
        block[0].register_forward_hook(lambda *_, k=k: runs.update({k: runs.get(k, 0) + 1}))
    file.apply(model)(models.batch("deep mlp")).backward()
    round_it = {k: sum(f"blocks.{k}" in entry["modules"] for entry in file.PLAN) for k in runs}
    assert max(round_it.values()) > 3
    # a checkpoint that another ends with is not run by that one: its input is all that is wanted there
    assert all(1 < runs[k] <= 1 + round_it[k] for k in runs)
    assert runs[0] == 1 + round_it[0]


def test_a_result_that_a_later_call_reads_is_not_hidden_in_a_checkpoint_round_two_modules():
    found = exported("recurrent", "revolve", slots=2)
    assert all(len(entry["modules"]) == 1 for entry in module_from(found.text).PLAN)
    same_values("recurrent", module_from(found.text).apply)


@dataclass(frozen=True, kw_only=True)
class OddLayers(Policy):
    """A policy of one's own, written without any solver: recomputes every other layer, op by op."""

    recomputes = True

    def plan(self, problem):
        trace, actions = problem.trace, []
        for layer in (1, 3):
            ops = [op for op in trace.ops if op.layer == layer and op.phase == "forward"]
            inside = {t for op in ops for t in op.writes}
            first = min(op.id for op in trace.ops if op.phase == "backward" and op.layer == layer)
            for op in ops:
                for t in op.writes:
                    readers = trace.readers(t)
                    if all(r in {o.id for o in ops} or trace.ops[r].phase == "backward" for r in readers):
                        early = [r for r in readers if trace.ops[r].phase == "forward"]
                        actions.append(Drop(t, after=max(early, default=op.id)))
            actions += [Recompute(op.id, before=first) for op in ops if inside & set(op.writes)]
        return Plan(trace, tuple(actions))


OTHERS = [
    ("mlp", OddLayers(), None, ["blocks.1", "blocks.3"]),
    ("mlp", "layers 0: full_recompute; rest: keep_all", None, ["blocks.0"]),
    ("mlp", "chen", None, None),
    ("mlp", "rotor", 0.8, None),
    ("attention net", "dtr", 0.9, None),
]


@pytest.mark.parametrize(("name", "policy", "share", "modules"), OTHERS)
def test_what_a_plan_means_is_read_from_its_run(name, policy, share, modules, monkeypatch):
    found = exported(name, policy, share)
    file = module_from(found.text)
    if modules is not None:
        assert [path for entry in file.PLAN for path in entry["modules"]] == modules
    assert tracked(name, file.apply, monkeypatch) == pytest.approx(found.cost.peak_bytes, rel=0.01)
    same_values(name, file.apply)


SCRIPT = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def first(batch=4):
    optimizer.zero_grad()
    model(torch.randn(batch, 8, 32)).backward()
    optimizer.step()


def last(batch=4):
    model(torch.randn(batch, 8, 32)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("policy", ["selective_recompute", "swap_all", "full_recompute"])
def test_where_gradients_are_freed_changes_nothing_of_what_is_wrapped(tmp_path, policy):
    (tmp_path / "script.py").write_text(SCRIPT)
    plans = []
    for step in ("first", "last"):
        trace = training_step(f"{tmp_path / 'script.py'}:{step}")
        plans.append(module_from(export(simulate(trace, machine(), policy), "torch").text).PLAN)
    assert plans[0] == plans[1] != []


UNLIKE = [
    ("layers 0-2: full_recompute; rest: keep_all", None),
    ("layers 3-5: full_recompute; rest: keep_all", None),
    ("layers 0-1: full_recompute; rest: keep_all", None),
    ("twremat", 0.95),
    ("dtr", 0.9),
]
"""Plans that treat the calls of a layer unlike each other; six calls of three layers."""


@pytest.mark.parametrize(("policy", "share"), UNLIKE)
def test_a_checkpoint_treats_all_calls_of_a_layer_alike_and_is_simulated_so(policy, share):
    found = exported("siamese", policy, share)
    file = module_from(found.text)
    shown = peak_of_storages("siamese", file.apply)
    assert shown == pytest.approx(found.cost.peak_bytes, rel=0.01)
    assert shown < peak_of_storages("siamese", lambda model: model)
    same_values("siamese", file.apply)


def test_where_what_resembles_the_run_does_not_fit_more_layers_are_wrapped():
    """What the run recomputed outside of the layers is kept in the file, so that it needs more checkpoints to fit."""
    trace = trace_of("mlp")
    kept = home_peak(simulate(trace, machine()).log)
    result = simulate(trace, machine(), "layers 0: full_recompute; rest: keep_all")
    peak = home_peak(result.log)
    assert export(result, "torch").cost.peak_bytes == peak < kept
    short = replace(result, platform=machine().with_budget(peak - 1))  # as if it had recomputed one more thing
    found = export(short, "torch")
    assert found.fits
    assert len(module_from(found.text).PLAN) == 2
    full = home_peak(simulate(trace, machine(), "full_recompute").log)
    lacking = export(replace(result, platform=machine().with_budget(full - 1)), "torch")
    assert not lacking.fits
    assert lacking.differences[-1] == "It does not fit: the run had " + format_bytes(full - 1) + "."
    assert lacking.differences[-1] in lacking.text


def test_a_plan_that_recomputes_nothing_wraps_nothing(monkeypatch):
    found = exported("mlp", "keep_all")
    assert module_from(found.text).PLAN == []
    assert found.cost == found.planned


def test_a_file_for_another_model_is_refused_where_it_differs():
    selective = module_from(exported("mixer", "selective_recompute").text)
    with pytest.raises(RuntimeError, match=r"blocks\.0: is not a module of Language"):
        selective.apply(MODELS["gpt2"][0]())
    model = selective.apply(MODELS["mixer"][0]())
    with pytest.raises(RuntimeError, match=r"blocks\.0: is wrapped already"):
        selective.apply(model)
    longer = MODELS["mixer"][0]()
    longer.blocks[0].tokens.append(torch.nn.Linear(16, 16))
    with pytest.raises(RuntimeError, match="ops 'product', and the plan was made for"):
        selective.apply(longer)(models.batch("mixer"))


def test_layers_under_one_checkpoint_have_to_follow_each_other():
    together = module_from(exported("mlp", "every_k", k=2).text)
    model = together.apply(MODELS["mlp"][0]())
    model.blocks = torch.nn.ModuleList([model.blocks[i] for i in (0, 2, 1, 3)])
    with pytest.raises(RuntimeError, match=r"blocks\.0 to blocks\.1: these modules are not called one after the other"):
        model(models.batch("mlp"))
    hooked = MODELS["mlp"][0]()
    hooked.blocks[1].register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"blocks\.1: has hooks"):
        together.apply(hooked)


class Scaled(torch.nn.Module):
    """Layers that are called with a mask and a factor of their own."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

        def forward(self, x, mask=None, *, factor=1.0):
            inner = torch.tanh(self.up(x))
            return x + factor * self.down(inner if mask is None else inner * mask)

    def __init__(self, factors, masked):
        super().__init__()
        self.layers = torch.nn.ModuleList(self.Layer() for _ in factors)
        self.factors, self.masked = factors, masked
        self.register_buffer("mask", torch.linspace(0, 1, 32))

    def forward(self, x):
        for layer, factor, masked in zip(self.layers, self.factors, self.masked, strict=True):
            x = layer(x, self.mask if masked else None, factor=factor)
        return x.square().mean()


@pytest.mark.parametrize(
    ("factors", "masked", "alike"),
    [([0.5] * 4, [True] * 4, True), ([1.0, 0.5, 1.0, 0.5], [True] * 4, False), ([0.5] * 4, [False, True] * 2, False)],
)
def test_layers_under_one_checkpoint_have_to_get_the_same_further_arguments(factors, masked, alike):
    def made():
        return Scaled(factors, masked)

    trace = models.capture(made, torch.empty(64, 8, device="meta"), optimizer=models.SGD, kernels="cpu")
    file = module_from(export(simulate(trace, machine(), "every_k", k=2), "torch").text)
    assert [len(entry["modules"]) for entry in file.PLAN] == [2, 2]
    torch.manual_seed(0)
    plain = made()
    torch.manual_seed(0)
    applied = file.apply(made())
    x = torch.randn(64, 8)
    if not alike:
        with pytest.raises(RuntimeError, match="are not called with the same further arguments"):
            applied(x)
        return
    for model in (plain, applied):
        model(x).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), applied.parameters(), strict=True))


class Beside(torch.nn.Module):
    """Layers that return a tuple: the tensor for the next one, and what they were given or something of their own."""

    class Layer(torch.nn.Module):
        def __init__(self, own):
            super().__init__()
            self.up, self.down, self.own = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8), own

        def forward(self, x, bias):
            inner = torch.tanh(self.up(x) + bias)
            return x + self.down(inner), inner.mean() if self.own else bias, None

    def __init__(self, own):
        super().__init__()
        self.layers = torch.nn.ModuleList(self.Layer(own) for _ in range(4))
        self.bias = torch.nn.Parameter(torch.linspace(0, 1, 32))

    def forward(self, x):
        bias = 2 * self.bias
        for layer in self.layers:
            x, handed, nothing = layer(x, bias)
            bias = bias if layer.own else handed
            assert nothing is None
        return x.square().mean()


@pytest.mark.parametrize("own", [False, True])
def test_layers_under_one_checkpoint_may_return_more_than_the_next_one_reads(own):
    def made():
        return Beside(own)

    trace = models.capture(made, torch.empty(64, 8, device="meta"), optimizer=models.SGD, kernels="cpu")
    file = module_from(export(simulate(trace, machine(), "every_k", k=2), "torch").text)
    assert [len(entry["modules"]) for entry in file.PLAN] == [2, 2]
    torch.manual_seed(0)
    plain = made()
    torch.manual_seed(0)
    applied = file.apply(made())
    x = torch.randn(64, 8)
    for model in (plain, applied):
        model(x).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), applied.parameters(), strict=True))
    bias = 2 * applied.bias
    _, handed, _ = applied.layers[0](torch.ones(2, 8), bias)
    assert handed is (None if own else bias)  # what a layer makes of its own is not another's


def test_a_cache_that_recomputation_would_fill_once_more_is_refused():
    """transformers 5 makes a `DynamicCache` in training, too, unless the configuration says `use_cache=False`."""
    cache = type("DynamicCache", (), {"__module__": "transformers.cache_utils"})()
    file = module_from(exported("mlp", "full_recompute").text)

    class Cached(torch.nn.Module):
        def forward(self, x, past_key_values=None):
            return x

    call = file.checkpointed(Cached(), "layers.0", {})
    x = torch.ones(2, requires_grad=True)
    call(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"layers\.0: is called with a DynamicCache.* use_cache=False"):
        call(x, past_key_values=cache)
    with torch.no_grad():
        call(x, past_key_values=cache)


class Growing(torch.nn.Module):
    """Layers that are called with the length of what they get, which each doubles, as Swin's stages halve theirs."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)

        def forward(self, x, length):
            x = x + self.down(torch.tanh(self.up(x.view(-1, length, 8))))
            return torch.cat([x, x], 1)

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, x.shape[1])
        return x.square().mean()


def test_layers_that_fail_with_the_arguments_of_the_first_are_named():
    trace = models.capture(Growing, torch.empty(3, 16, 8, device="meta"), optimizer=models.SGD, kernels="cpu")
    file = module_from(export(simulate(trace, machine(), "every_k", k=2), "torch").text)
    applied = file.apply(Growing())
    with pytest.raises(RuntimeError, match=r"layers\.0 to layers\.1: a module fails on .* share a checkpoint"):
        applied(torch.randn(3, 16, 8))


# ---- offload -------------------------------------------------------------------------------------


def at_once():
    """A machine whose links take no time: then what is in flight is nowhere, as under fake tensors."""
    links = (Link("d2h", "hbm", "host", 10**18), Link("h2d", "host", "hbm", 10**18))
    return replace(machine(), links=links)


SENT = [
    ("mlp", "swap_all"),
    ("encoder", "full_recompute; checkpoints: swap_all"),
    ("gpt2", "save_on_cpu"),
    ("mixer", "layers 0: full_recompute; layers 1: swap_all"),
    ("residual net", "swap_all"),
    ("llama", "swap_all"),
]


@pytest.mark.parametrize(("name", "policy"), SENT)
def test_what_the_plan_moves_is_on_the_host_between_forward_and_backward(name, policy, monkeypatch):
    result = simulate(trace_of(name), at_once(), policy)
    found = export(result, "torch")
    file = module_from(found.text)
    same_values(name, file.apply)
    file = module_from(found.text)
    file.HOST = "meta"  # so that the tracker tells it from the device
    device, host = tracked(name, file.apply, monkeypatch, host=True)
    assert device == pytest.approx(found.cost.peak_bytes, rel=0.01)
    names = trace_of(name).tensor_columns
    moved = sum(int(names.bytes[t]) for t in meaning_of(result).moved)
    assert 0.4 * moved < host <= moved


def test_gradients_of_several_batches_and_of_a_second_step_stay_the_same():
    file = module_from(export(simulate(trace_of("mlp"), at_once(), "swap_all"), "torch").text)
    torch.manual_seed(0)
    plain = MODELS["mlp"][0]()
    torch.manual_seed(0)
    applied = file.apply(MODELS["mlp"][0]())
    for model in (plain, applied):
        for _ in range(2):
            for part in models.batch("mlp").chunk(2):
                model(part).backward()
        with torch.no_grad():
            model(models.batch("mlp"))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), applied.parameters(), strict=True))


class Recorded:
    """A device's module whose streams only record what they are told."""

    def __init__(self):
        self.said, self.count = [], 0

    def Stream(self):
        self.count += 1
        return RecordedStream(("out", "back")[self.count - 1], self.said)

    def current_stream(self):
        return RecordedStream("compute", self.said)

    @contextmanager
    def stream(self, stream):
        self.said.append(f"on {stream.name}")
        yield


class RecordedStream:
    def __init__(self, name, said):
        self.name, self.said = name, said

    def wait_stream(self, other):
        self.said.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.said.append(f"{self.name} waits for {event}")

    def record_event(self):
        self.said.append(f"{self.name} marks its end")
        return f"the end of {self.name}"


def test_copies_run_on_streams_of_their_own_and_wait_for_what_they_need(monkeypatch):
    file = module_from(export(simulate(trace_of("mlp"), at_once(), "swap_all"), "torch").text)
    module = Recorded()
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: module.said.append(f"kept for {stream.name}"))
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, pin_memory=False, **options: empty(*args, **options))
    x = torch.randn(4, 6)
    copy = file.Copy(x[1:, ::2], file.Streams(module))
    assert module.said == ["out waits for compute", "on out", "kept for out", "out marks its end"]
    module.said.clear()
    assert torch.equal(copy.flat().as_strided((3, 3), (6, 2), 6), x[1:, ::2])
    assert module.said == [
        *("back waits for the end of out", "back waits for compute", "on back", "kept for back"),
        *("back marks its end", "compute waits for the end of back"),
    ]


def test_what_a_trace_does_not_name_is_sent_by_module():
    config = {"model_type": "gpt2", **models.GPT2, "activation_function": "gelu_new"}
    trace = transformer(config, batch=3, sequence=24, dropout=0.0)
    found = export(simulate(trace, at_once(), "swap_all"), "torch", layers="body.layers.*")
    file = module_from(found.text)
    assert {entry["send"] for entry in file.PLAN} == {"all"}
    same_values("gpt2", file.apply)

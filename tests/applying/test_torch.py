"""A plan exported for PyTorch: its tracker's peak is the simulated one, losses and gradients are the plain run's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.distributed._tools import mem_tracker  # noqa: E402

from sim import Drop, Plan, Policy, Recompute, export, simulate  # noqa: E402
from sim.analysis.peak_memory import home_peak  # noqa: E402
from tests.applying import models  # noqa: E402
from tests.applying.models import MODELS, module_from, trained  # noqa: E402
from tests.validation.oracle import machine  # noqa: E402

trace_of = cache(models.trace_of)


def tracked(name, apply, monkeypatch):
    """The peak of PyTorch's own tracker for a step under fake tensors, sizes not rounded."""
    monkeypatch.setattr(mem_tracker._WeakRefInfo, "_calculate_mem_consumed", lambda self: self.size * self.element_size)
    make, shape = MODELS[name]
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = apply(make())
        x = torch.zeros(shape, dtype=torch.int64 if models.is_language(name) else torch.float32)
        tuned = models.SGD(model.parameters())

        def step():
            model(x).backward()
            tuned.step()
            tuned.zero_grad()

        step()
        tracker = mem_tracker.MemTracker()
        tracker.track_external(model, x, tuned)
        with tracker:
            step()
    (peak,) = [each for kind, each in tracker.get_tracker_snapshot("peak").items() if kind.type == "cpu"]
    return peak[mem_tracker._TOTAL_KEY]


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


@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_round_layers_hold_what_pytorchs_tracker_shows(name, monkeypatch):
    found = exported(name, "full_recompute")
    assert not found.differences
    assert found.cost == found.planned
    assert tracked(name, module_from(found.text).apply, monkeypatch) == pytest.approx(found.cost.peak_bytes, rel=0.01)
    same_values(name, module_from(found.text).apply)


SELECTIVE = [
    ("gpt2", "selective_recompute", None),
    ("gpt2, eager", "dtr", 0.85),
    ("llama", "sac_knapsack", 0.9),
    ("encoder", "selective_recompute", None),
    ("mixer", "selective_recompute", None),
    ("attention net", "sac_knapsack", 0.9),
    ("residual net", "selective_recompute", None),
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

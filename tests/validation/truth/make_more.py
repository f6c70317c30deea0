"""Writes tests/validation/data/pytorch_more.json: peaks of real PyTorch steps that no rule here was written from.

python -m tests.validation.truth.make_more            all cases (minutes; needs transformers, peft and a C++ compiler)
python -m tests.validation.truth.make_more NAME …     print these only

Tests need the file, not this script.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tests.validation.truth import guard  # noqa: F401, before torch

import torch  # isort: skip
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.validation.truth import models
from tests.validation.truth.cases import CASES
from tests.validation.truth.ledger import Ledger, cuda_kernels

TARGET = Path(__file__).parents[1] / "data" / "pytorch_more.json"
aten = torch.ops.aten
PRODUCTS = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
]


MASTERS = ("mixed", "megatron")
TYPES = {
    "bf16": torch.bfloat16,
    "mixed_bf16": torch.bfloat16,
    "megatron_bf16": torch.bfloat16,
    "fp16": torch.float16,
}


ATTENTION = {op for op in PRODUCTS if "attention" in str(op)}


def titan_contexts():
    """Those of torchtitan's option `op`: fused attention is kept, and of `mm` all but every second."""
    count = {True: 0, False: 0}

    def choose(ctx, func, *args, **kwargs):
        count[ctx.is_recompute] += func == aten.mm.default
        kept = func in ATTENTION or (func == aten.mm.default and count[ctx.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


CONTEXTS = {
    "full_ckpt": None,
    "selective_ckpt": partial(create_selective_checkpoint_contexts, PRODUCTS),
    "titan_ckpt": titan_contexts,
}


def checkpoint_layers(model: nn.Module, kind: str) -> None:
    """A non-reentrant checkpoint round every layer, which keeps what a kind of `CONTEXTS` says."""
    for layer in models.layers_of(model):
        contexts = CONTEXTS[kind]
        given = {"context_fn": contexts} if contexts else {}
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **given)


def optimizer_of(name: str, parameters: list[nn.Parameter], precision: str):
    """The optimizer of that name, over fp32 copies of the parameters where the precision has them."""
    kinds = {
        "adamw_foreach": partial(torch.optim.AdamW, foreach=True),
        "adamw_fused": partial(torch.optim.AdamW, fused=True),
        "adamw_loop": partial(torch.optim.AdamW, foreach=False),
        "adafactor": partial(torch.optim.Adafactor, foreach=False),
        "sgd_momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    }
    if precision.startswith("megatron"):
        return models.MainGradients(parameters, kinds[name])
    return models.Masters(parameters, kinds[name]) if precision.startswith(MASTERS) else kinds[name](parameters)


class InBackward:
    """One optimizer per parameter, which a hook runs once the parameter's gradient is complete; then it's released."""

    def __init__(self, ledger: Ledger, name: str, parameters: list[nn.Parameter], precision: str) -> None:
        assert not precision.startswith(MASTERS), "a hook has no fp32 copies"
        self.ledger = ledger
        self.each = {p: optimizer_of(name, [p], precision) for p in parameters}
        for p in parameters:
            p.register_post_accumulate_grad_hook(self.update)

    def update(self, parameter: nn.Parameter) -> None:
        self.ledger.phase = self.ledger.phase and "update"
        self.each[parameter].step()
        self.each[parameter].zero_grad(set_to_none=True)
        self.ledger.phase = self.ledger.phase and "backward"

    def zero_grad(self, set_to_none: bool) -> None:
        """Nothing is left to release."""
        assert set_to_none
        assert all(parameter.grad is None for parameter in self.each)

    @property
    def state(self) -> dict:
        return {key: state for each in self.each.values() for key, state in each.state.items()}

    @property
    def param_groups(self) -> list[dict]:
        return [{"params": list(self.each)}]


class Scaler(torch.amp.GradScaler):
    """GradScaler that takes every step: whether a gradient is infinite is data, and fake tensors have none."""

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale=None):
        self._per_optimizer_states.clear()


class Tracker(MemTracker):
    """MemTracker for frozen parameters, too: without the hooks that tell gradients from temporaries."""

    def _track_module_params_and_buffers(self, module, install_grad_hooks=True):
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)


@contextmanager
def numbers_are_one() -> Iterator[None]:
    """`item` gives 1.0: Adafactor asks for norms, and fake tensors have none."""
    before = torch.Tensor.item
    torch.Tensor.item = lambda tensor: 1.0
    try:
        yield
    finally:
        torch.Tensor.item = before


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    """New tensors of that type, as a model is loaded in 16 bits."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def run(case: dict, detail: bool = False) -> dict:
    """The figures of one case: live bytes at the start and after forward, and the highest point of each phase."""
    a, policy = case["arguments"], case["policy"]
    precision, micro_batches = a["precision"], a.get("micro_batches", 1)
    stored = a.get("frozen_dtype", precision)
    dtype = TYPES.get(stored, torch.float32)
    half = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}.get(precision)
    with ExitStack() as stack:
        stack.enter_context(cuda_kernels())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(numbers_are_one() if a["optimizer"] == "adafactor" else nullcontext())
        with torch.device("cuda"), default_type(dtype):
            model = models.build(case).train()
            batches = [models.batch_of(case, a["batch"] // micro_batches) for _ in range(micro_batches)]
        if policy in CONTEXTS:
            checkpoint_layers(model, policy)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        ledger = Ledger(detail=detail)
        hooked = policy == "optimizer_in_backward"
        make = partial(InBackward, ledger) if hooked else optimizer_of
        tuned = make(a["optimizer"], trained, precision)
        scaler = Scaler("cuda", init_scale=1024.0) if precision == "amp_fp16" else None

        def iteration() -> None:
            for batch in batches:
                ledger.phase = ledger.phase and "forward"
                saved = torch.autograd.graph.save_on_cpu() if policy == "save_on_cpu" else nullcontext()
                cast = torch.autocast("cuda", half) if half else nullcontext()
                with saved, cast:
                    loss = model(**batch).loss
                ledger.phase = ledger.phase and "backward"
                after.append(dict(ledger.live))
                (scaler.scale(loss) if scaler else loss).backward()
                del loss
            ledger.phase = ledger.phase and "update"
            if scaler:
                scaler.step(tuned)
                scaler.update()
            elif not hooked:
                tuned.step()
            tuned.zero_grad(set_to_none=True)

        after: list[dict[str, int]] = []
        iteration()
        after.clear()
        for tensor in (*model.parameters(), *model.buffers()):
            ledger.add(tensor, "parameter", "parameter")
        for state in tuned.state.values():
            for tensor in state.values():
                ledger.add(tensor, "rest", "state")
        for tensor in tuned.param_groups[0]["params"]:
            ledger.add(tensor, "rest", "master")  # unless it is a parameter of the model
        for batch in batches:
            for tensor in batch.values():
                ledger.add(tensor, "other", "batch")
        if scaler:
            ledger.add(scaler._scale, "other", "scale")
        start = dict(ledger.live)
        stack.enter_context(ledger.modules())
        with ledger:
            ledger.phase = "forward"
            iteration()
        found = {
            "start": start,
            "after_forward": after[0],
            "peaks": ledger.peaks,
            "host_peak": ledger.host_peak,
            "parameters": sum(p.numel() for p in model.parameters()),
            "trainable_parameters": sum(p.numel() for p in trained),
        }
        if detail:
            found["where"] = ledger.where
        if micro_batches == 1 and not scaler:
            ledger.phase = ""
            tracker = Tracker() if len(trained) < len(list(model.parameters())) else MemTracker()
            owners = [] if precision.startswith(MASTERS) else list(tuned.each.values()) if hooked else [tuned]
            tracker.track_external(model, *batches[0].values(), *owners)
            if precision.startswith(MASTERS):
                tracker.track_external(*[x for s in tuned.state.values() for x in s.values()])
                tracker.track_external(*tuned.param_groups[0]["params"])
            with tracker:
                iteration()
            total = next(v["Total"] for d, v in tracker.get_tracker_snapshot("peak").items() if d.type == "cuda")
            highest = max(peak["total"] for peak in ledger.peaks.values())
            found["mem_tracker_peak"] = total
            if total != highest:
                print(f"{case['case']}: MemTracker has {total}, the ledger {highest}", file=sys.stderr)
    return found


def main(names: list[str]) -> None:
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda: True
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    rows = []
    for case in CASES:
        if names and case["case"] not in names:
            continue
        rows.append({**case, **run(case)})
        print(case["case"], {k: v["total"] for k, v in rows[-1]["peaks"].items()}, file=sys.stderr)
    if not names:
        head = {name: version(name) for name in ("torch", "transformers", "peft")}
        text = ",\n".join(json.dumps(row) for row in rows)
        TARGET.write_text(f'{{"made_with": {json.dumps(head)}, "rows": [\n{text}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

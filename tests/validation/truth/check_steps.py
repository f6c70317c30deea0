"""Runs the steps of `tiersim validate` on fake CUDA tensors, and prints how far the simulated peaks are from theirs.

python -m tests.validation.truth.check_steps

It says what the table of a CUDA device may be expected to show, workspaces inside kernels apart.
"""

from __future__ import annotations

import gc

from tests.validation.truth import guard  # noqa: F401, before torch

import torch  # isort: skip
from torch._subclasses.fake_tensor import FakeTensorMode

from sim.experiment import simulate
from sim.measure.steps import Steps
from sim.measure.validate import POLICIES, PRECISIONS, config_of
from tests.validation.oracle import Peaks, machine, peaks_of
from tests.validation.truth.cases import GPT2, LLAMA
from tests.validation.truth.ledger import Ledger, cuda_kernels
from tests.validation.truth.make_more import default_type
from workloads import transformer

BATCH, SEQUENCE = 3, 256


def pretend() -> None:
    """Answers of a device that fake tensors cannot be asked for; parameters are made in their type, not cast."""
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda: True
    torch.cuda.get_rng_state = lambda *args: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda *args: None
    torch.nn.Module.to = lambda self, *args: self


def real(config: dict, precision: str, attention: str, dropout: float, policy: str) -> dict[str, dict[str, int]]:
    """The highest point of each phase of one step in the steady state."""
    with cuda_kernels(), FakeTensorMode(allow_non_fake_inputs=True):
        with default_type(torch.bfloat16 if precision == "bf16" else torch.float32):
            steps = Steps(config, BATCH, SEQUENCE, precision, attention, dropout, "cuda")
        steps.step(policy)
        gc.collect()
        ledger = Ledger()
        for tensor in steps._held():
            ledger.add(tensor, "rest")

        def enter(phase: str) -> None:
            ledger.phase = phase

        with ledger:
            steps.step(policy, enter)
    return ledger.peaks


def ours(config: dict, precision: str, attention: str, dropout: float, policy: str) -> Peaks:
    """The same, simulated."""
    trace = transformer(
        config, batch=BATCH, sequence=SEQUENCE, precision=precision, attention=attention, dropout=dropout
    )
    name, parameters = POLICIES[policy]
    return peaks_of(simulate(trace, machine(), name, **parameters).log)


def main() -> None:
    pretend()
    for model in (GPT2, LLAMA):
        config = config_of(model, SEQUENCE)
        dropout = 0.1 if config["model_type"] == "gpt2" else 0.0
        for precision in PRECISIONS:
            for attention in ("sdpa", "eager"):
                for policy in POLICIES:
                    case = config, precision, attention, dropout, policy
                    truth, got = real(*case), ours(*case)
                    errors = (f"{phase} {got.total(phase) / peak['total'] - 1:+.4%}" for phase, peak in truth.items())
                    print(config["model_type"], precision, attention, f"{policy}:", ", ".join(errors), flush=True)


if __name__ == "__main__":
    main()

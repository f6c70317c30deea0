"""What this machine's CPU takes to dispatch an op of PyTorch: the figures of `sim/hardware/dispatch.toml`.

    python -m sim.measure.dispatch [--device cuda]

A GPT of 12 layers is so narrow that its kernels take next to nothing: an iteration is bound by the CPU. On a CUDA
device the time per kernel is that of its dispatch, launches included. On the CPU, kernels of some elements stand for
the launches, which are to be added.
"""

# mypy: allow-subclassing-any

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from sim.measure import choose_device, require_torch

NARROW = {"vocab_size": 32, "n_positions": 16, "n_embd": 8, "n_layer": 12, "n_head": 2}
TOKENS = 4
ROUNDS = 30


class Measured(NamedTuple):
    """Microseconds per kernel of forward and backward, and per parameter of the optimizer; how many there are.

    kernels: of forward and of backward, views left out. parameters: tensors that the optimizer updates.
    """

    forward: float
    backward: float
    update: float
    kernels: tuple[int, int]
    parameters: int


def measure(device: str, autocast: bool = False, rounds: int = ROUNDS) -> Measured:
    """The figures of a device, each the least of some rounds.

    device: as `choose_device` gives it. autocast: to bfloat16.

    Raises TiersimError without PyTorch.
    """
    require_torch("sim.measure.dispatch")
    import torch

    from sim.measure.gpt2 import Gpt2, plain

    model = Gpt2(NARROW, attention="sdpa", dropout=0.0).to(device)
    ids = torch.randint(0, NARROW["vocab_size"], (1, TOKENS), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def forward() -> Any:
        with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=autocast):
            return model(ids, ids, plain)

    def settle() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    clock = time.process_time if device == "cpu" else time.perf_counter  # autograd has threads of its own on CUDA
    counts = _kernels(forward)
    best = [float("inf")] * 3
    for _ in range(rounds):
        optimizer.zero_grad(set_to_none=True)
        settle()
        marks = [clock()]
        loss = forward()
        marks.append(clock())
        loss.backward()
        marks.append(clock())
        optimizer.step()
        marks.append(clock())
        best = [min(least, 1e6 * (b - a)) for least, a, b in zip(best, marks, marks[1:])]
    tensors = len(list(model.parameters()))
    return Measured(best[0] / counts[0], best[1] / counts[1], best[2] / tensors, counts, tensors)


def _kernels(forward: Callable[[], Any]) -> tuple[int, int]:
    """How many ops other than views forward and backward dispatch."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counted(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += not func.is_view and "_unsafe_view" not in str(func) and "detach" not in str(func)
            return func(*args, **(kwargs or {}))

    with Counted() as first:
        loss = forward()
    with Counted() as second:
        loss.backward()
    return first.count, second.count


def main(argv: list[str] | None = None) -> None:
    """Print the figures of a device, with and without autocast, on one thread."""
    parser = argparse.ArgumentParser(prog="python -m sim.measure.dispatch", description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="cpu, cuda or cuda:1; by default cuda where there is such a device")
    given = parser.parse_args(argv)
    require_torch("sim.measure.dispatch")
    device = choose_device(given.device)
    import torch

    torch.set_num_threads(1)
    for autocast in (False, True):
        found = measure(device, autocast)
        print(
            f"{device}, {'autocast to bf16' if autocast else 'fp32'}: per kernel {found.forward:.1f} us forward, "
            f"{found.backward:.1f} us backward ({found.kernels[0]} and {found.kernels[1]} kernels); "
            f"AdamW {found.update:.1f} us per parameter of {found.parameters}"
        )


if __name__ == "__main__":
    main()

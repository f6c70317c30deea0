"""Where gradients meet: autograd sums them in place in a real run, and into a new tensor while ops are observed."""

from __future__ import annotations

from itertools import accumulate

from workloads.capturing.record import Recording

NOTE = "the peak is where two gradients meet: a real run adds them in place and may need up to {:,} bytes less"


def sum_at_peak(recording: Recording) -> int:
    """Bytes of the sum of two gradients that a step makes where it needs most memory, 0 where it makes none there.

    Such a sum is one that autograd makes itself, of which an addend is as long as the result and is freed as it ends.
    """
    kernels, storages = recording.kernels, recording.storages
    change = [0] * (len(kernels) + 1)
    for storage in storages.values():
        change[max(storage.made, storage.appeared, 0)] += storage.bytes
        if storage.freed is not None:
            change[min(storage.freed, len(kernels) - 1) + 1] -= storage.bytes
    held = list(accumulate(change[: len(kernels)]))
    top = max(range(len(kernels)), key=held.__getitem__)
    if top not in recording.summed or len(kernels[top].made) != 1:
        return 0
    result, *addends = (storages[i] for i in (*kernels[top].made, *kernels[top].reads))
    last = any(each.freed == top and each.made >= 0 and each.bytes == result.bytes for each in addends)
    return result.bytes if last else 0

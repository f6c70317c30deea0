"""Packed sequences of recurrent layers, whose sizes follow from the lengths of the sequences.

`pack_padded_sequence` needs lengths as values. Where they are known (a list, a tensor made of one, an input given with
its values, and what is computed from these), they are those; where they are not, and where they are no lengths that a
batch of this size can have, all sequences are taken to be as long as the batch. How many sequences go on at each
position (`PackedSequence.batch_sizes`) lies on the host, and PyTorch's own code for packed sequences reads it there. So
it is a tensor with data, and that code runs as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

MOST = 1 << 16
"""Elements of a tensor whose values are followed."""
LONG = "packed sequences are as long as their batch"
VALUES, UNKNOWN, HOST = "_tiersim_values", "_tiersim_unknown", "_tiersim_host"
PACK = "_pack_padded_sequence"
FILLED = ("zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
"""Ops that make a mask of known values, if they make truths."""


def values_of(tensor: Any) -> Any:
    """The values of a tensor of integers or truths, as a tensor with data; None where they are not known."""
    values = tensor if hasattr(tensor, HOST) else getattr(tensor, VALUES, None)
    return None if values is None or getattr(values.untyped_storage(), UNKNOWN, False) else values


def number_of(tensor: Any) -> Any:
    """The value of a tensor of one element, None where it is not known."""
    values = values_of(tensor)
    if values is None:
        return None
    with _without_modes():
        return values.item()


def keep_values(fake: Any, tensor: Any) -> None:
    """A fake tensor stands for one that has data; keep them where they may be lengths: integers on one axis."""
    if type(tensor).__name__ != "Tensor" or tensor.device.type == "meta" or tensor.dim() > 1 or tensor.numel() > MOST:
        return
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.layout != import_module("torch").strided:
        return
    with _without_modes():
        setattr(fake, VALUES, tensor.clone())


def note(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Follow values through an op: they are computed where those of all its operands are known."""
    if func._opname == "lift_fresh":
        if not hasattr(args[0], "fake_mode"):
            keep_values(out, args[0])
        return
    torch: Any = import_module("torch")
    if func._opname in FILLED and out.dtype == torch.bool:
        _keep_filled(func._opname, args, out)
        return
    first = args[0] if args else None
    if isinstance(first, (list, tuple)) and first:
        first = first[0]
    if (values := getattr(first, VALUES, None)) is None:
        return
    operands = [x for x in import_module("torch.utils._pytree").tree_leaves((args, kwargs)) if torch.is_tensor(x)]
    small = all(each.numel() <= MOST for each in _listed(out) if torch.is_tensor(each))
    known = all(values_of(x) is not None for x in operands) and torch.Tag.nondeterministic_seeded not in func.tags
    known = known and small
    written = func._schema.arguments[0].alias_info
    if written is not None and written.is_write and not known:
        setattr(values.untyped_storage(), UNKNOWN, True)
    if not known:
        return
    with _without_modes():
        result = func(*_with_values(args), **dict(zip(kwargs, _with_values(kwargs.values()), strict=True)))
    for fake, each in zip(_listed(out), _listed(result), strict=True):
        if torch.is_tensor(each):
            setattr(fake, VALUES, each)


def _keep_filled(op: str, args: Any, out: Any) -> None:
    """Keep the values of a mask that is made of one truth."""
    if out.numel() <= MOST:
        truth = bool(args[-1]) if "full" in op else "ones" in op
        with _without_modes():
            setattr(out, VALUES, import_module("torch").full(tuple(out.shape), truth))


def _listed(out: Any) -> Any:
    return out if isinstance(out, (list, tuple)) else (out,)


def is_on_host(types: Any, args: Any) -> bool:
    """Whether an op's first operand is a tensor with data that says how many sequences go on."""
    return not types and bool(args) and hasattr(args[0], HOST)


def on_host(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an op on such a tensor; it is one, too."""
    torch: Any = import_module("torch")
    with _without_modes():
        out = func(*args, **kwargs)
        for each in out if isinstance(out, (list, tuple)) else (out,):
            if torch.is_tensor(each):
                setattr(each, HOST, True)
    return out


def packed(batch: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any, bool]:
    """The sequences of a padded batch one after the other, how many go on at each position, and whether that is known.

    batch: fake, (longest, sequences, …), or (sequences, longest, …) if `batch_first`.
    lengths: of the sequences.

    Raises RuntimeError as PyTorch does for known lengths that do not fall.
    """
    torch: Any = import_module("torch")
    longest, count = batch.shape[:2] if not batch_first else (batch.shape[1], batch.shape[0])
    values = values_of(lengths)
    with _without_modes():
        known = values is not None and bool(((values > 0) & (values <= longest)).all())
        each = values.to(torch.int64) if known else torch.full((count,), longest)
        rows, sizes = torch._pack_padded_sequence(torch.empty((longest, count, 1), dtype=torch.bool), each, False)
        setattr(sizes, HOST, True)
    return batch.new_empty((rows.shape[0], *batch.shape[2:])), sizes, known


@contextmanager
def padded_again() -> Iterator[None]:
    """While this lasts, `pad_packed_sequence` runs without writing to a tensor that has no data."""
    torch: Any = import_module("torch")

    def padded(data: Any, sizes: Any, batch_first: bool, padding: Any, total: int) -> tuple[Any, Any]:
        """PyTorch's own algorithm (2.13): positions at which equally many sequences go on are copied together."""
        counts = sizes.tolist()
        if 0 < total < len(counts):
            raise ValueError(f"total_length {total} is less than the longest sequence, which has {len(counts)}")
        steps = total if total > 0 else len(counts)
        out = torch.full((steps, counts[0], *data.shape[1:]), padding, dtype=data.dtype, device=data.device)
        lengths = torch.empty(counts[0], dtype=torch.int64)
        begun = done = 0
        for i in range(1, len(counts) + 1):
            if i < len(counts) and counts[i] == counts[begun]:
                continue
            rows = counts[begun] * (i - begun)
            part = data[done : done + rows]
            out[begun:i, : counts[begun]].copy_(part.view(i - begun, counts[begun], *data.shape[1:]))
            begun, done = i, done + rows
        with _without_modes():
            setattr(lengths, VALUES, (sizes.unsqueeze(0) > torch.arange(counts[0]).unsqueeze(1)).sum(1))
        return (out.transpose(0, 1) if batch_first else out), lengths

    from unittest.mock import patch  # brings asyncio with it

    with patch.object(import_module("torch._VF"), "_pad_packed_sequence", padded):
        yield


def _with_values(given: Any) -> list[Any]:
    return [
        _with_values(each) if isinstance(each, (list, tuple)) else values if values is not None else each
        for each in given
        for values in (values_of(each),)
    ]


def _without_modes() -> Any:
    return import_module("torch.utils._python_dispatch")._disable_current_modes()

"""What a trace records about one tensor."""

from __future__ import annotations

from dataclasses import dataclass

ROLES = (
    "weight",
    "gradient",
    "optimizer_state",
    "activation",
    "input",
    "temporary",
)
"""What a tensor is for; reports break memory down by role."""

TOKENS, ROWS = AXES = ("tokens", "rows")
"""What an axis of a shape counts, where what builds a trace says so: the tokens of one or of all samples; of a mixture,
the rows of its experts, one for each expert of a token."""

ROLE_CODE = {role: code for code, role in enumerate(ROLES)}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One value: a row of a `Trace`.

    A tensor holds one value and is never overwritten. An in-place write produces a new tensor in the storage of
    the old one. A view of another tensor is not a tensor of its own, unless its op says so
    (`Op.views`): then it has no bytes.

    id: its row in the trace.
    name: unique within the trace.
    bytes: size of its storage.
    role: what it is for, one of `ROLES`.
    layer: index of the layer it belongs to, -1 for none.
    shape: where known, else None.
    dtype: where known, else "".
    zeros: fraction of zero elements where known, else None.
    replaces: id of the tensor whose storage this one takes over in place (an optimizer's new weight). It adds no
        bytes, and the old value is lost. None for a storage of its own.
    saved_for: why a backward op needs it, "" where nothing saved it.
    axes: per axis of its shape one of `AXES`, "" for any other; None where none is, or nothing is known of them.
    """

    id: int
    name: str
    bytes: int
    role: str
    layer: int = -1
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    zeros: float | None = None
    replaces: int | None = None
    saved_for: str = ""
    axes: tuple[str, ...] | None = None

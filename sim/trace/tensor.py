"""What a trace knows of one tensor."""

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
"""What a tensor is for; reports split memory by it."""

ROLE_CODE = {role: code for code, role in enumerate(ROLES)}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One value; a view of one row of a `Trace`.

    A tensor is one value, never overwritten. `replaces` is the id of the tensor whose storage this one
    takes over in place (an optimizer's new weight): no new bytes, and the old value is gone. A view of
    another tensor is not a tensor of its own.

    id: its row. bytes: size of its storage. layer: index of the layer it belongs to, -1 for none.
    shape, dtype: where known. zeros: fraction of zero elements where known.
    saved_for: why a backward op needs it, "" where nothing saved it.
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

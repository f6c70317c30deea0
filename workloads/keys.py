"""Looking up the keys of a configuration: sizes, shares, flags and choices, under all the names that each may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sim.errors import WorkloadError, near
from workloads.other_models import LONGEST, NotBuiltIn, shown

ACTIVATIONS = {
    "gelu_new": "gelu_new",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
}
"""Known activations, and the kernel or composition that computes each (`workloads.activations`)."""

MOST = {"layers": 4096, "experts": 4096}
MOST_EXPERTS = 1 << 17
"""Sizes that ops are counted by, and the most that is built: a configuration may come from anywhere."""


class Reader:
    """Looks up fields of a configuration; errors name file and key.

    aliases: per field the keys under which it may stand, in the order in which they are tried.
    """

    def __init__(self, values: Mapping[str, Any], where: str, aliases: Mapping[str, tuple[str, ...]]) -> None:
        self.values, self.where, self.aliases = dict(values), where, aliases

    def key(self, field: str) -> str:
        """The key under which the file has a field, or its usual key."""
        return next((k for k in self.aliases[field] if self.values.get(k) is not None), self.aliases[field][0])

    def raw(self, field: str) -> Any:
        """The value of a field, None where the file has none."""
        return next((self.values[k] for k in self.aliases[field] if self.values.get(k) is not None), None)

    def size(self, field: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`; without a default the field must be there."""
        value = self.raw(field)
        if value is None:
            if default is None:
                raise WorkloadError(f"{self.where}: key {' or '.join(map(repr, self.aliases[field]))} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise WorkloadError(
                f"{self.where}: {self.key(field)}: needs an integer of at least {least}, has {shown(value)}"
            )
        if value > (most := MOST.get(field, 1 << 40)):
            raise WorkloadError(f"{self.where}: {self.key(field)}: is built up to {most:,}, has {shown(value, 24)}")
        return value

    def share(self, field: str, default: float) -> float:
        """A number from 0 up to 1."""
        value = self.raw(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
            raise WorkloadError(f"{self.where}: {self.key(field)}: needs a number from 0 up to 1, has {shown(value)}")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(field)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise WorkloadError(f"{self.where}: {self.key(field)}: needs true or false, has {shown(value)}")
        return value

    def choice(self, field: str, known: Mapping[str, str], default: str) -> str:
        """What `known` has under the value of a field, which is one of its keys."""
        value = self.raw(field) or default
        if not isinstance(value, str) or value not in known:
            hint = near(value[:LONGEST], known) if isinstance(value, str) else ""
            raise WorkloadError(f"{self.where}: {self.key(field)}: {shown(value)} is unknown{hint}")
        return known[value]

    def part(self, field: str, default: float, of: int) -> float:
        """A share of so many elements, which must come to an even number of them: they are rotated in pairs."""
        value = self.raw(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
            raise WorkloadError(f"{self.where}: {self.key(field)}: needs a number over 0 up to 1, has {shown(value)}")
        turned = int(of * value)
        if turned % 2 or not turned:
            nearest = max(2, turned - turned % 2) / of
            raise WorkloadError(
                f"{self.where}: {self.key(field)}: {shown(value)} of a head of {of} is {turned}, which is not a "
                f"positive even number; nearest: {nearest:g}"
            )
        return float(value)

    def heads(self, *, grouped: bool) -> tuple[int, int, int, int]:
        """Hidden width, heads, heads of keys and values, and the width of a head."""
        hidden, heads = self.size("hidden"), self.size("heads")
        kv_heads = self.size("kv_heads", heads) if grouped else heads
        if not self.raw("head") and hidden % heads:
            raise WorkloadError(f"{self.where}: {self.key('hidden')} {hidden} is not a multiple of {heads} heads")
        if heads % kv_heads:
            raise WorkloadError(f"{self.where}: {self.key('kv_heads')} {kv_heads} does not divide {heads} heads")
        return hidden, heads, kv_heads, self.size("head", hidden // heads)

    def activation(self, default: str) -> str:
        """The kernel or composition of the activation. The library may know others."""
        try:
            return self.choice("activation", ACTIVATIONS, default)
        except WorkloadError as error:
            raise NotBuiltIn(str(error)) from None

    def published(self) -> int:
        """How many parameters were published, 0 where the file does not say."""
        count = self.values.get("published_parameters", 0)
        return count if isinstance(count, int) and 0 <= count < 1 << 63 else 0

    def source(self) -> str:
        """Where the sizes were published, "" where the file does not say."""
        return str(source) if isinstance(source := self.values.get("source", ""), str) else ""

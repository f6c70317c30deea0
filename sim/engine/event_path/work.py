"""One run of an op under way."""

from __future__ import annotations


class Work:
    """One run of an op: what it produces, what it overwrites, and the workspace that it takes.

    why: `run` for the first one, else `recompute`.
    counted: whether its reads were expected beforehand, in program order or by a planned Recompute.
    fresh: (tensor, tier) of results that take space.
    takeovers: (old value, new value, tier) of results in place; -1 for a new value that is resident already, so that
        nothing takes over the storage of the old one.
    workspace: (tier, bytes, handle); results that are resident already are recomputed there, too.
    began: when it began on an engine beside the device's main one.
    """

    __slots__ = ("began", "counted", "device", "fresh", "op", "takeovers", "why", "workspace")

    def __init__(self, op: int, device: int, why: str, counted: bool) -> None:
        self.op = op
        self.device = device
        self.why = why
        self.counted = counted
        self.fresh: list[tuple[int, int]] = []
        self.takeovers: list[tuple[int, int, int]] = []
        self.workspace: list[tuple[int, int, int]] = []
        self.began = -1

    def begin(self, now: int) -> None:
        """It starts."""
        self.began = now

    def successor_is_there(self, index: int) -> None:
        """The result of a takeover is there already: the old value's storage is just given back."""
        old, _, tier = self.takeovers[index]
        self.takeovers[index] = (old, -1, tier)

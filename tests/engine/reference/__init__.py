"""A reference simulator: slow, naive, and independent of `sim.engine`.

It replays a plan by the words of the contract: one list of what is under way, one loop from instant to instant,
everything looked up afresh each time. It reads the same frozen inputs (trace, plan, platform) as the engine and
shares no code with it: times of ops and copies, routes, fair shares, liveness, space and log rows are worked out
here. Memory is counted in bytes (the `exact` allocator); allocators with addresses have tests of their own.

    durations.py   how long ops and copies take, and by which route copies go
    sharing.py     how flows share links and pools
    store.py       copies of tensors, the space that they take, and the rows of the log
    copying.py     moves between tiers
    computing.py   ops on engines, and groups of ops
    devices.py     the program of one device
    clock.py       the instants of a run, and how it ends
"""

from tests.engine.reference.clock import Outcome, simulate

__all__ = ["Outcome", "simulate"]

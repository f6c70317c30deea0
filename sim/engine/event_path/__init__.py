"""A replay event by event: devices walk their ops, copies run beside them, one SimPy clock orders all.

Three files tell what happens in a run: `device` (an op after the other, and `perform` where one has to wait),
`settling` (what is granted at the end of an instant) and `lifetimes` (what is freed when).

    what is known   residency: where copies are          space: bytes per tier        record: rows and counters
    what runs       device, fast_path, perform           engines, groups: beside it   transfers: copies
    how one waits   waits, space_queue: for space        links, flows, fairness: for bandwidth
    from end to end run: start and refusal               closing: the end             parts: how all is tied together
"""

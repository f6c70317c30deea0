"""A replay event by event: devices walk their ops, copies run beside them, one SimPy clock orders all.

Three files tell what happens: `run` (how a run starts, what is granted at the end of an instant, how it ends),
`device` (one op after the other) and `lifetimes` (what is freed when). A part's fields are written by that part alone.

    what is known          state: clock, record, residency and transfers, space, lifetimes, ops under way
    what a device does     device; where an op has to wait: perform, operands, waits
    what runs beside it    engines, groups: ops     transfers: copies     links, flows, fairness: bandwidth
    what the plan says     decisions: its actions, its online part
    what ties it together  parts: which part works with which     refusals: why a run ends early
"""

"""The copy path: one device that walks its ops in program order while copies run beside it.

With one device an instant is: the op ends, copies end, the plan's actions after the op are carried out, dead tensors
are freed, the actions before the next op follow, those of an online part last, then links start what waits for them.
The event path takes these steps from a queue of events, as several devices and engines need it. Here they are a loop
over the ops, on lists by tensor, without an object per copy; the rows are those of the event path.

    covered    which runs take it, and what the device does in turn
    device     the device: its ops, and what they wait for
    copies     copies and releases of tensors, space
    wires      links: their queues, and the bandwidth that they share
    asked      the online part
    view       what that sees

What such runs rarely do is left to the event path, which begins again (`Elsewhere`): a copy that goes on to a third
tier or over several links, a result that is copied while it is recomputed, what does not fit at the start, copies that
wait for space to the end, and whatever else is refused but for an op's want of memory and for thrashing.
"""

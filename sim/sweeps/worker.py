"""The program of a `sim.sweeps.process.Worker`: tasks on standard input, outcomes on standard output.

It ends when its input does: a driver that dies takes its workers with it, even in the middle of a cell.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from contextlib import nullcontext
from importlib import import_module


def main(idle_s: float | None, bench: str) -> None:
    """Run tasks until there are no more, or none has come for `idle_s` seconds.

    bench: `module:Class` of what runs them.
    """
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the output of libraries is not an outcome
    tasks: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(tasks,), daemon=True).start()

    from sim.limits import end_where_stuck
    from sim.sweeps.identity import sources_stamp

    end_where_stuck(tells=False)

    module, _, name = bench.partition(":")
    runs = getattr(import_module(module), name)()
    try:
        out.write(sources_stamp().encode() + b"\n")
        out.flush()
        with getattr(runs, "collecting", nullcontext)():
            while True:
                outcome = runs.run(json.loads(tasks.get(timeout=idle_s)))
                out.write(json.dumps(outcome).encode() + b"\n")
                out.flush()
    except (BrokenPipeError, queue.Empty):  # the driver has ended, or needs it no longer
        os._exit(0)


def _listen(tasks: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        tasks.put(line)
    os._exit(0)

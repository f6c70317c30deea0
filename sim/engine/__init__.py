"""The engine: replays a plan on a platform, one SimPy process per device, and writes the event log."""

from importlib.util import find_spec


def is_compiled() -> bool:
    """Whether its event path is C, as a wheel that was built with `HATCH_BUILD_HOOK_ENABLE_MYPYC=1` has it."""
    found = find_spec("sim.engine.event_path.run")
    return found is not None and not str(found.origin).endswith(".py")

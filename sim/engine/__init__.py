"""The engine: replays a plan on a platform, one SimPy process per device, and writes the event log."""

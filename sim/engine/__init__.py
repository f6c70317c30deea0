"""The engine: replays a plan on a platform, one SimPy process a device, and writes the event log."""

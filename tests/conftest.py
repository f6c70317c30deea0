"""Settings of all tests: no deadline of Hypothesis and no database left behind; tests of speed run alone."""

import fcntl
import os
import tempfile
from pathlib import Path

import matplotlib
import pytest
from hypothesis import settings

matplotlib.use("Agg")
settings.register_profile("tiersim", deadline=None, database=None, derandomize=True)
settings.load_profile("tiersim")

LOCKS = "TIERSIM_TEST_LOCKS"


def pytest_configure(config):
    """The process that was started by hand makes the folder; the workers of pytest-xdist inherit its name."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="tiersim-locks-")
        os.environ[LOCKS] = folder.name
        config.add_cleanup(folder.cleanup)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """While a test marked `alone` runs, all other workers wait: what it measures is its own.

    A test holds the room, shared or alone, and passes the door to get there: who waits at the door for
    the room to be empty lets nobody in behind.
    """
    folder = Path(os.environ[LOCKS])
    alone = item.get_closest_marker("alone") is not None
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        return (yield)

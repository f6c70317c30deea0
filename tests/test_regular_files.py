"""Files that may be anything: what is executed is the source that is checked, and none is read without end."""

import os
import py_compile
from importlib.util import cache_from_source

import pytest

from sim.errors import PolicyError, TiersimError
from sim.policies import load, policy_class
from sim.regular_files import file_sum, read_file
from workloads.capturing.reference import opened

POLICY = "from sim.plan import Plan\nfrom sim.policies.base import Policy\nclass Mine(Policy):\n    who = 'source'\n"


def planted(path, text):
    """A compiled file beside a source, which is taken whatever the source says."""
    (path.parent / "evil.py").write_text(text)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(path.parent / "evil.py"), cfile=cache_from_source(str(path)), invalidation_mode=mode)


def test_a_function_of_a_step_is_that_of_its_source_and_not_of_a_compiled_file_beside_it(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def step():\n    return 'source'\n")
    planted(path, "def step():\n    return 'planted'\n")
    with opened(f"{path}:step") as loaded:
        assert loaded()() == "source"


def test_a_policy_is_that_of_its_source_and_not_of_a_compiled_file_beside_it(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(POLICY.replace("who", "WHO"))
    planted(path, POLICY.replace("who", "WHO").replace("'source'", "'planted'"))
    assert policy_class(str(path)).WHO == "source"


def test_a_program_of_gigabytes_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "large.py"
    with open(path, "wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(PolicyError, match=r"large.py: has more than 16,777,216 bytes"):
        load(str(path))
    with pytest.raises(TiersimError, match=r"large.py: has more than 16,777,216 bytes"), opened(f"{path}:step"):
        pass


@pytest.mark.timeout(20)
@pytest.mark.parametrize("read", [read_file, file_sum])
def test_what_may_never_end_is_not_read(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(TiersimError, match="is not a regular file"):
            read(path)


def test_the_sum_of_a_file_is_that_of_all_its_bytes(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    assert file_sum(tmp_path / "x").startswith("ba7816bf8f01cfea")


def written():
    """What writes a file as a whole, by renaming another to its path."""
    from sim.hardware.profile import profile_text
    from sim.measure.calibrate import write_profile
    from sim.measure.grid import write
    from sim.report.files import write_aside
    from sim.trace import TraceBuilder
    from sim.trace.io import save
    from workloads.exporters.chakra import _save

    trace = TraceBuilder({}).build()
    return {
        "a page": lambda path: write_aside(path, lambda file: None),
        "a trace": lambda path: save(trace, path),
        "a trace for other tools": lambda path: _save(path, b""),
        "a profile": lambda path: write_profile(path, profile_text("p100")),
        "a grid": lambda path: write(path, "p100", []),
    }


@pytest.mark.parametrize("what", ["a page", "a trace", "a trace for other tools", "a profile", "a grid"])
def test_no_file_takes_the_place_of_a_pipe_or_a_device(what, tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises((OSError, TiersimError), match="is not a regular file"):
            written()[what](path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]
    assert pipe.is_fifo()
    assert link.is_symlink()


@pytest.mark.parametrize("what", ["a page", "a trace", "a trace for other tools", "a profile", "a grid"])
def test_a_file_takes_the_place_of_a_file(what, tmp_path):
    (tmp_path / "x").write_text("older")
    written()[what](tmp_path / "x")
    assert (tmp_path / "x").read_text() != "older"
    assert len(list(tmp_path.iterdir())) == 1

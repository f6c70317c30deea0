"""A file that is written aside appears whole or not at all, and an error names the file that was asked for."""

import errno
import os

import pytest

from sim.report.files import write_aside


def test_the_folder_is_made_and_the_file_is_whole(tmp_path):
    target = write_aside(tmp_path / "a" / "b" / "page.html", lambda file: file.write(b"all"))
    assert target.read_bytes() == b"all"
    assert [path.name for path in target.parent.iterdir()] == ["page.html"]


def test_an_error_names_the_target_and_leaves_the_older_file(tmp_path):
    target = tmp_path / "page.html"
    target.write_bytes(b"older")

    def full(file):
        file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left") as refused:
        write_aside(target, full)
    assert refused.value.filename == str(target)
    assert target.read_bytes() == b"older"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path):
    with pytest.raises(IsADirectoryError) as refused:
        write_aside(tmp_path, lambda file: file.write(b""))
    assert refused.value.filename == str(tmp_path)
    assert list(tmp_path.iterdir()) == []

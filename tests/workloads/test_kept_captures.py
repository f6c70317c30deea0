"""Captures are kept by content, and the folder does not grow without end."""

from __future__ import annotations

import os

import pytest

from sim.trace.builder import TraceBuilder
from workloads import steps


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TIERSIM_CACHE", str(tmp_path))
    return tmp_path / "captures"


def made(name, calls):
    def make():
        calls.append(name)
        builder = TraceBuilder({"model": name})
        builder.op("op", "copy", writes=[builder.tensor("x", 8, "activation")], bytes=8)
        return builder.build()

    return make


def test_a_capture_is_made_once(folder):
    calls = []
    assert steps.kept(["a"], made("a", calls)) == steps.kept(["a"], made("a", calls))
    assert calls == ["a"]


def test_what_was_not_used_for_longest_is_deleted(folder, monkeypatch):
    calls = []
    for age, name in enumerate("abc"):
        steps.kept([name], made(name, calls))
        for path in folder.iterdir():
            if path.stat().st_mtime > 1000:
                os.utime(path, (10 + age, 10 + age))
    steps.kept(["a"], made("a", calls))  # used again
    size = sum(path.stat().st_size for path in folder.iterdir())
    monkeypatch.setattr(steps, "LARGEST_FOLDER", size)
    steps.kept(["d"], made("d", calls))
    assert calls == ["a", "b", "c", "d"]
    for name in "acd":
        steps.kept([name], made(name, calls))
    assert calls == ["a", "b", "c", "d"]  # b alone has been deleted
    monkeypatch.setattr(steps, "LARGEST_FOLDER", 1)
    steps.kept(["b"], made("b", calls))
    assert len(list(folder.iterdir())) == 1  # the newest stays, whatever its size

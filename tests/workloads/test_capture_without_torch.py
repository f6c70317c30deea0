"""Without PyTorch the package works, and capturing says what is missing."""

from __future__ import annotations

import sys

import pytest

from sim.errors import WorkloadError
from workloads.capture import capture, capture_from_reference


@pytest.mark.parametrize("call", [lambda: capture(object), lambda: capture_from_reference("module:function")])
def test_the_missing_extra_is_named(call, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(WorkloadError, match=r"needs PyTorch: pip install 'tiersim\[torch\]'"):
        call()

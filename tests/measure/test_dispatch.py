"""Dispatch measured on the CPU: kernels are counted as the trace has them, and every figure is some microseconds."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from sim.measure.dispatch import NARROW, main, measure
from sim.trace.op import PHASE_CODE
from workloads import transformer


def test_the_kernels_that_are_counted_are_those_of_the_trace():
    found = measure("cpu", rounds=2)
    trace = transformer({"model_type": "gpt2", **NARROW}, batch=1, sequence=4, attention="sdpa", dropout=0.0)
    phases = trace.op_columns.phase
    assert found.kernels == tuple((phases == PHASE_CODE[phase]).sum() for phase in ("forward", "backward"))
    assert found.parameters == 148
    assert min(found.forward, found.backward, found.update) > 0


def test_the_command_prints_both_types(capsys):
    main(["--device", "cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "us forward" in lines[0]
    assert "bf16" in lines[1]

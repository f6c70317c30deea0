"""An argument of the wrong kind is one line that names it, whatever went wrong inside."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import sim
import workloads
from sim.arguments import ArgumentError, explained
from sim.errors import TiersimError

HUGE = 10**5000
WRONG = [None, "x", 3.5, float("nan"), -1, HUGE, [], {}, object(), ["x"], b"x", int, print]
LONG = (("n", HUGE), ("policies", None), ("policies", []))
"""Right, but long."""

CHAIN = workloads.uniform_chain(4)
MACHINE = "a100_40_pcie"
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "load_profile": (sim.load_profile, (MACHINE,), {}),
    "load_policy": (sim.load_policy, ("keep_all",), {}),
    "simulate": (
        sim.simulate,
        (CHAIN, MACHINE, "keep_all"),
        {"budget": None, "iterations": 1, "seed": 0, "recompute_limit": None, "parallel": None},
    ),
    "compare": (
        sim.compare,
        (CHAIN, MACHINE, ["keep_all"]),
        {"seed": 0, "iterations": 1, "time_limit_s": None, "most_actions": None, "bound": False},
    ),
    "lay_out": (sim.lay_out, (CHAIN, MACHINE, {}), {}),
    "smallest_budget": (sim.smallest_budget, (CHAIN, MACHINE, "keep_all"), {"tolerance": 0.1}),
    "lower_bound": (sim.lower_bound, (CHAIN, MACHINE, None), {"max_ops": 10, "seconds": 1.0}),
    "save_trace": (sim.save_trace, (CHAIN, "/"), {}),
    "load_trace": (workloads.load_trace, ("/",), {"max_bytes": 10}),
    "training_step": (workloads.training_step, ("gpt2",), {"batch": 1, "sequence": 8, "precision": "fp32"}),
    "cnn": (workloads.cnn, ("resnet18", 1, 32), {"precision": "fp32", "dropout": None}),
    "varied_lengths": (workloads.varied_lengths, ("gpt2",), {"batch": 1, "sequences": [8]}),
    "joined": (workloads.joined, ([CHAIN],), {}),
    "uniform_chain": (workloads.uniform_chain, (4, 1, 1), {}),
    "unet": (workloads.unet, (2, 10, 1), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_kind_is_refused_in_words_or_works(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # "x" is the name of a file, too
    function, args, options = CALLS[name]
    names = list(inspect.signature(function).parameters)
    given = dict(zip(names, args)) | options
    for key in given:
        for wrong in WRONG:
            if (key, wrong) in LONG:
                continue
            with suppress(TiersimError):
                function(**given | {key: wrong})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: sim.load_profile(None), "load_profile: name_or_path: expected text or a path, found None"),  # type: ignore[arg-type]
        (
            lambda: sim.simulate(CHAIN, MACHINE, iterations="3"),  # type: ignore[arg-type]
            "simulate: iterations: expected a whole number or None, found '3' (str)",
        ),
        (
            lambda: sim.simulate(CHAIN, MACHINE, ["keep_all"]),  # type: ignore[arg-type]
            "simulate: policy: expected text, a Policy or a class of Policy, found a list",
        ),
        (lambda: sim.simulate(CHAIN, MACHINE, iterations=HUGE), "iterations must be at most 1,000,000"),
        (
            lambda: sim.compare(CHAIN, MACHINE, time_limit_s=float("nan")),
            "time limit: expected 0 to 100,000,000 seconds, or None for no limit",
        ),
    ],
)
def test_what_is_said(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(TiersimError) as caught:
        call()
    assert str(caught.value) == said


@explained
def failing(
    number: int = 1,
    share: float = 1,
    names: Sequence[str] = (),
    table: Mapping[str, int] | None = None,
    call: Callable[[], None] = lambda: None,
    sort: Literal["a", "b"] = "a",
) -> None:
    raise ValueError("inside")


@pytest.mark.parametrize(
    "right",
    [
        {},
        {"number": np.int64(3), "share": np.float32(1)},
        {"share": 3, "names": ["a"], "table": {"a": 1}},
        {"table": None, "call": print, "sort": "b"},
    ],
)
def test_right_kinds_leave_the_error_as_it_is(right: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^inside$"):
        failing(**right)


@pytest.mark.parametrize(
    ("key", "wrong", "expected", "found"),
    [
        ("number", 1.5, "a whole number", "1.5 (float)"),
        pytest.param("number", HUGE, "a whole number", "one of 16610 bits", id="huge"),
        ("share", "1", "a number", "'1' (str)"),
        ("names", "keep_all", "a list", "'keep_all' (str)"),
        ("names", [1], "a list", "a list"),
        ("table", {"a": "b"}, "a table or None", "a dict"),
        ("call", 3, "a function", "3 (int)"),
        ("sort", "c", "'a' or 'b'", "'c' (str)"),
    ],
)
def test_wrong_kinds_are_named(key: str, wrong: Any, expected: str, found: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        failing(**{key: wrong})
    assert str(caught.value) == f"failing: {key}: expected {expected}, found {found}"
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value.__cause__, ValueError)

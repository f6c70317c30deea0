"""Earlier names work, warn at the caller's line, and name the present one, as docs/stability.md promises."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Literal

import pytest

from sim.cli import main
from sim.deprecation import Renamed, formerly
from sim.errors import PolicyError
from sim.policies import load
from sim.policies.base import Policy


@dataclass(frozen=True, kw_only=True)
class Eager(Policy):
    """A policy two of whose parameters were renamed, one of them twice."""

    depth: int = field(default=1, metadata=formerly("ahead", "lookahead"))
    order: Literal["first", "last"] = field(default="first", metadata=formerly("ties"))


@pytest.mark.parametrize(
    ("given", "present"),
    [({"ahead": 3}, {"depth": 3}), ({"lookahead": 4}, {"depth": 4}), ({"ties": "last"}, {"order": "last"})],
)
def test_an_earlier_name_of_a_parameter_works_and_warns_at_the_line_that_gave_it(given, present):
    (old,), (new,) = given, present
    with pytest.warns(Renamed, match=f"'{old}' is now called '{new}'") as told:
        assert load(Eager, **given) == Eager(**present)
    assert [warning.filename for warning in told] == [__file__]


def test_it_is_checked_like_the_present_name():
    with pytest.warns(Renamed), pytest.raises(PolicyError, match="order is 'any'; expected 'first' or 'last'"):
        load(Eager, ties="any")


def test_both_names_at_once_are_refused():
    with pytest.raises(PolicyError, match="'ahead' is an earlier name of 'depth': give one of them"):
        load(Eager, ahead=3, depth=3)


def test_a_misspelt_name_gets_the_nearest_present_one():
    with pytest.raises(PolicyError, match=r"no parameter 'dept' \(did you mean 'depth'\?\)"):
        load(Eager, dept=3)


def test_the_tests_of_the_project_make_it_an_error():
    with pytest.raises(Renamed):
        load(Eager, ahead=3)


def test_present_names_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(Eager, depth=3).depth == 3


@pytest.mark.parametrize("name", ["checkmate", "moccasin"])
@pytest.mark.parametrize("text", [False, True])
def test_grain_is_granularity(name, text):
    with pytest.warns(Renamed, match="'grain' is now called 'granularity'"):
        policy = load(f"{name}(grain=stage)") if text else load(name, grain="stage")
    assert policy == load(name, granularity="stage")


def test_the_command_line_says_it_once_on_standard_error(capsys, monkeypatch):
    words = ["run", "--profile", "mt3000_survey", "--model", "gpt2", "--seq", "64", "--policy", "checkmate"]
    monkeypatch.setattr("sys.argv", ["tiersim", *words, "-p", "grain=stage", "-p", "method=rounding"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "grain" in line]
    assert said == ["tiersim: policy 'checkmate': parameter 'grain' is now called 'granularity'"]

"""What a policy declares of its parameters and traits is what it takes, wherever they come from."""

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import pydantic
import pytest
from annotated_types import Ge, Gt, Interval, Le, Len, Lt

from sim.declared import OneOf, Rate, Size, allows, bounds, choices, declarations, expected, hint, plain, takes_anything
from sim.errors import PolicyError
from sim.plan import Plan
from sim.policies import load, names, policy_class
from sim.policies.base import NEEDS, TRAITS, Policy, default_of
from sim.report.listings import policy_page, policy_record
from sim.sweeps.study import load_study

if TYPE_CHECKING:
    from fractions import Fraction

PARAMETERS = [
    pytest.param(name, field, id=f"{name}-{field.name}")
    for name in names()
    for field in dataclasses.fields(policy_class(name))
]


def outside(declared: Any) -> list[Any]:
    """Values just outside of what a declaration allows."""
    limits = bounds(declared)
    wrong = [limits[key] - 1 for key in ("ge", "gt") if key in limits] + [
        limits[key] + 1 for key in ("le", "lt") if key in limits
    ]
    wrong += [limits[key] for key in ("gt", "lt") if key in limits]
    if choices(declared):
        wrong += [("egger",), "egger"]
    return [*wrong, object(), b"", 1.5j]


@pytest.mark.parametrize(("name", "field"), PARAMETERS)
def test_a_parameter_takes_its_default_and_nothing_outside_its_declaration(name, field):
    found = policy_class(name)
    declared = declarations(found)[field.name]
    assert allows(declared, default_of(field))
    for value in outside(declared):
        with pytest.raises(PolicyError) as refused:
            found(**{field.name: value})
        start = f"policy {name!r}: {field.name} is {value!r}; expected {expected(declared)}"
        assert str(refused.value).startswith(start)


@pytest.mark.parametrize(("name", "field"), PARAMETERS)
def test_every_text_has_choices_and_every_number_bounds(name, field):
    declared = declarations(policy_class(name))[field.name]
    assert not takes_anything(declared), (
        f"{name}: {field.name}: {plain(declared)} takes anything: bounds: Annotated[int, Ge(0)]; choices: Literal"
    )


class GoesWith(Exception):
    """A value that needs another parameter."""


def make(name: str, key: str, value: Any) -> None:
    try:
        policy_class(name)(**{key: value})
    except PolicyError as error:
        raise (GoesWith if "goes with" in str(error) else error) from error


@pytest.mark.parametrize(("name", "field"), PARAMETERS)
def test_every_choice_is_taken_alone_or_refused_for_what_else_is_given(name, field):
    for value in choices(declarations(policy_class(name))[field.name]) or ():
        given = (value,) if isinstance(field.default, tuple) else value
        with suppress(GoesWith):
            make(name, field.name, given)


# ---- one place for all ways in ---------------------------------------------------------------------

MISTAKE = "policy 'rotor': slots is 1; expected int of at least 2"


def test_python_refuses_it():
    for make in (lambda: policy_class("rotor")(slots=1), lambda: load("rotor", slots=1)):
        with pytest.raises(PolicyError) as refused:
            make()
        assert str(refused.value) == MISTAKE
    with pytest.raises(PolicyError, match=MISTAKE):
        dataclasses.replace(load("rotor"), slots=1)


def test_the_command_line_refuses_it():
    words = ["run", "--profile", "a100_40_pcie", "--model", "gpt2", "--policy", "rotor", "-p", "slots=1"]
    ran = subprocess.run([sys.executable, "-m", "sim", *words], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", f"tiersim: {MISTAKE}\n")


def test_a_study_refuses_it_before_it_runs():
    study = {"name": "one", "profile": "a100_40_pcie", "model": "gpt2", "policy": {"name": "rotor", "slots": [1, 2]}}
    with pytest.raises(Exception, match=MISTAKE):
        load_study(study).cells()


# ---- policies of one's own -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Mine(Policy):
    """Keeps everything."""

    share: Annotated[float, Gt(0), Lt(1)] = 0.5
    window: Annotated[int, Interval(ge=2, le=8)] | None = None
    way: Literal["in", "out"] = "in"
    ways: Annotated[tuple[Literal["in", "out"], ...], Len(1)] = ("in",)
    amount: Size = 0
    piece: Annotated[Size, Ge(4)] = 4
    speed: Rate = 1
    table: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sloppy: int = None  # type: ignore[assignment]
    exact: "Fraction | None" = None

    def __post_init__(self) -> None:  # says nothing of the base's
        if self.way == "out" and self.share > 0.5:
            raise PolicyError("way 'out' goes with a share up to 0.5")

    def plan(self, problem):
        return Plan(problem.trace)


@pytest.mark.parametrize(("given", "text"), [
    ({"share": 0}, "policy 'Mine': share is 0; expected float above 0 and below 1"),
    ({"share": 1}, "share is 1; expected"),
    ({"share": float("nan")}, "share is nan; expected"),
    ({"share": True}, "share is True; expected"),
    ({"window": 9}, "window is 9; expected int from 2 to 8 or None"),
    ({"window": 2.0}, "window is 2.0; expected int"),
    ({"way": "ot"}, "way is 'ot'; expected 'in' or 'out' (did you mean 'out'"),
    ({"way": None}, "way is None; expected"),
    ({"ways": ()}, "ways is (); expected tuple of 'in' or 'out' (not empty)"),
    ({"ways": ("in", "oot")}, "ways is ('in', 'oot'); expected tuple of 'in' or 'out' (not empty) (did you mean 'out'"),
    ({"amount": "3 Gb"}, "amount is '3 Gb'; expected bytes, 0 or more, or a size such as '50 MB' (did you mean 'GB'"),
    ({"amount": -1}, "amount is -1; expected"),
    ({"piece": 0}, "piece is 0; expected bytes, 4 or more, or a size such as '50 MB'"),
    ({"speed": 0}, "speed is 0; expected bytes/s, 1 or more"),
    ({"speed": "3 GB"}, "speed is '3 GB'; expected"),
    ({"table": {"a": "b"}}, "table is {'a': 'b'}; expected"),
    ({"sloppy": "x"}, "sloppy is 'x'; expected int"),
    ({"way": "out", "share": 0.6}, "way 'out' goes with a share up to 0.5"),
])  # fmt: skip
def test_what_a_policy_of_ones_own_declares_holds(given, text):
    for make in (Mine, lambda **given: load(Mine, **given), lambda **given: load(Mine(), **given)):
        with pytest.raises(PolicyError) as refused:
            make(**given)
        assert text in str(refused.value)


def test_what_a_declaration_allows_is_taken():
    assert Mine(share=0.25, window=8, ways=("out",), amount="3 GB", speed="1 GB/s", table={"a": 1}).window == 8
    assert Mine(way="out", exact="anything").exact == "anything"  # a type that the file does not import
    assert load(Mine, ways=["in", "out"]).ways == ("in", "out")


def test_a_policy_built_on_another_keeps_its_checks():
    @dataclass(frozen=True, kw_only=True)
    class More(Mine):
        depth: Annotated[int, Ge(1), Le(3)] = 1

        def __post_init__(self) -> None:
            super().__post_init__()

    with pytest.raises(PolicyError, match="depth is 4; expected int from 1 to 3"):
        More(depth=4)
    with pytest.raises(PolicyError, match="share is 2; expected"):
        More(share=2)
    with pytest.raises(PolicyError, match="goes with a share"):
        More(way="out", share=0.6)


def test_what_one_declares_in_the_words_of_pydantic_holds_too():
    pydantic = pytest.importorskip("pydantic")
    declared = Annotated[int, pydantic.Field(gt=3)]
    assert allows(declared, 4)
    assert not allows(declared, 3)


# ---- the listing -----------------------------------------------------------------------------------


def test_the_page_of_a_policy_shows_choices_and_bounds():
    page = policy_page("delta")
    for text in ("'stale_size' or 'cost_adjacent'", "float from 0 to below 1", "a rate such as '11 GB/s' or None"):
        assert text in page
    record = {p["name"]: p for p in policy_record("delta")["parameters"]}
    assert record["watermark"]["bounds"] == {"ge": 0, "lt": 1}
    assert record["prefetch"]["choices"] == ("fifo", "lifo", "none")
    assert [record[key]["type"] for key in ("prefetch", "bandwidth", "evicts")] == [
        "str",
        "int | str | None",
        "tuple[str, ...]",
    ]


def test_a_registry_that_grows_is_a_choice_that_grows():
    registry = {"one": 1}
    declared = Annotated[str, OneOf(registry)]
    assert not allows(declared, "two")
    registry["two"] = 2
    assert allows(declared, "two")
    assert choices(declared) == ("one", "two")
    assert hint(declared, "tow") == " (did you mean 'two'?)"


# ---- traits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trait", "value", "text"), [
    ("needs", frozenset({"hots"}), "'inference' or 'peers' (did you mean 'host'"),
    ("needs", {"host"}, "needs is {'host'}; expected frozenset"),
    ("manages", ("activation",), "(did you mean 'activations'"),
    ("fidelity", "equation", "(did you mean 'equations'"),
    ("saves", {"lunch": "all of it"}, "(did you mean 'launch'"),
    ("saves", {"magic": "all of it"}, "'copy', 'release' or 'fusion' to str"),
    ("online", 1, "online is 1; expected bool"),
    ("warm_up", -1, "warm_up is -1; expected int of at least 0"),
    ("optimal", True, "optimal is True; expected str"),
    ("recompute", True, "recompute is not a trait (did you mean 'recomputes'"),
    ("at_least", 3, "at_least: int = 3"),
])  # fmt: skip
def test_a_trait_outside_its_vocabulary_is_refused_where_the_class_is_defined(trait, value, text):
    with pytest.raises(PolicyError) as refused:
        type("Wrong", (Policy,), {trait: value, "__module__": __name__})
    assert str(refused.value).startswith(f"policy 'Wrong': {trait} is ")
    assert text in str(refused.value)


def test_a_trait_may_be_decided_by_a_parameter_and_constants_are_no_traits():
    class Fine(Policy):
        CHEAP = ("norm",)
        _cache: ClassVar[dict] = {}

        @property
        def online(self):
            return True

        needs = frozenset(NEEDS)

    assert Fine().online


def test_every_trait_is_documented():
    doc = Policy.__doc__
    assert all(f"{trait}:" in doc or f"{trait}, " in doc for trait in TRAITS), doc


def test_policies_are_listed_without_what_checks_other_types():
    code = (
        "import sys; from sim.policies import names, load; [load(n) for n in names()]; print('pydantic' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def fails(*_: object) -> None:
    raise KeyError("mine")


@pytest.mark.parametrize("trait", TRAITS)
@pytest.mark.parametrize("decides", [fails, lambda policy: object()])
def test_a_trait_that_a_property_decides_is_refused_by_name_before_anything_runs(trait, decides):
    own = type("Own", (Policy,), {trait: property(decides)})
    for made in (own, own()):
        with pytest.raises(PolicyError, match=r"mine|Own.*expected") as refused:
            load(made)
        assert trait in str(refused.value)


def test_an_array_is_a_parameter_as_any_other():
    import numpy

    from sim.policies import label

    @dataclass(frozen=True, kw_only=True)
    class Own(Policy):
        sizes: Any = None

    assert label(load(Own, sizes=numpy.arange(3))) == "Own(sizes=[0 1 2])"


def test_a_type_is_prepared_once_however_many_compositions_have_it(monkeypatch):
    """It took nine tenths of the time in which the 487 compositions that `advise` may try are loaded."""
    made = []
    adapter = pydantic.TypeAdapter
    monkeypatch.setattr(pydantic, "TypeAdapter", lambda *given, **how: made.append(given) or adapter(*given, **how))
    load("zero_offload + full_recompute")
    made.clear()
    for name in ("zero_offload + dtr", "zero_offload + swap_all", "optimizer_in_backward + swap_all"):
        load(name)
    assert made == []
    assert not allows(list[int], ["one"])
    assert allows(list[int], [1])

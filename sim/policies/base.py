"""What every policy is: a frozen set of parameters, some declared traits, and one method."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, get_args

from annotated_types import Ge

from sim.declared import OneOf, allows, declarations, expected, hint, is_trait
from sim.errors import PolicyError, near
from sim.plan import Plan, Problem
from sim.policies.traits import FIDELITIES, MANAGED_AS, MANAGES, NEEDS, SAVINGS, Fidelity, Managed, Needed, PlansFrom
from sim.policies.writing import text_of
from sim.trace.graph import Trace

__all__ = [
    "FIDELITIES",
    "MANAGED_AS",
    "MANAGES",
    "NEEDS",
    "SAVINGS",
    "TRAITS",
    "Beside",
    "Fidelity",
    "Join",
    "Managed",
    "Needed",
    "PlansFrom",
    "Policy",
    "by_parameter",
    "default_of",
    "joins",
    "label",
    "own_name",
]


@dataclass(frozen=True)
class Beside:
    """A value of a parameter that shows only beside values of others: `Beside(6, granularity="stage")`."""

    value: Any
    others: Mapping[str, Any]

    def __init__(self, value: Any, **others: Any) -> None:
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "others", MappingProxyType(others))


def by_parameter(**said: Any) -> Mapping[str, Any]:
    """Something for each of a policy's parameters, by name."""
    return MappingProxyType(said)


Join = Callable[[Sequence["Policy"], str], "Policy"]
"""One policy that combines several. The text is a selector that narrows what each of them owns, "" for none."""

_join: Join


def joins(join: Join) -> Join:
    """Declare, as a decorator, which function combines policies: it is what `a + b` and `a.on(selector)` return.

    What it returns is a policy, so its module imports this one, and this one does not import it. The function is
    `sim.policies.composition.joined`; the package `sim.policies` imports it, hence whoever imports any policy.
    """
    global _join
    _join = join
    return join


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Decides what to keep, drop, recompute and move. Subclass it, one policy a file.

    A subclass is a frozen, keyword-only dataclass whose fields are its parameters. Each value but the default is held
    against the field's type, choices and bounds (`sim.declared`); a `__post_init__` runs after that, and
    checks what the parameters have to do with each other. The traits below are declared on the class, refused where
    they are none of these or have another type, and verified by `sim.conformance`:

    online: decides while running (its plan has `online`). recomputes, moves: whether ops may run twice,
    whether bytes may move. rewrites: whether it changes the trace. lossless: same values as the plain
    run. optimal: the class of plans of which its plan is proven to be the fastest ("among plans that …"), "" for
    none; `in_class` says which plans belong to it. needs: what the trace or the platform must have
    (`NEEDS`). solver: what it solves with, "" for nothing. warm_up: iterations before the steady state.
    manages: which roles it may drop or move (`MANAGES`). yields: which of these another part of a composition that
    manages them takes over. fidelity: how near to the published system:
    `code` (checked against the authors'), `equations` (the paper's), or `reconstruction`, the default.
    saves: by what its rewrite makes ops cheaper than those that they stand for (`SAVINGS`), and why.
    splits_batch: whether it may run parts of the batch one after the other, in microbatches of its own.
    plans_ahead: what an online policy takes from the whole trace before it starts, "" for nothing; its choices then
    depend on what comes after.
    slow: planning takes long, so that `compare` leaves it out unless it is named.
    plans_from: what its plan depends on at most: the whole `problem`; the trace and the `machine`, but neither the
    budget nor the seed, history or replays; or the `structure` of the trace alone, no size, no FLOPs, no fact in
    `meta`, and nothing of the machine. Who plans by `sim.policies.sharing` then plans once for all that is alike.

    Three more say how its tests try it. other_values: per parameter a value that is not the default, with which some
    run differs (`by_parameter`); `Beside` where it takes others to show. unseen: per parameter for which no quick run
    shows that, why. rarely: why a declared trait shows in fewer than 30 % of random examples, "" where it does not.
    What a base of the class says of a parameter holds for the class, too.
    """

    online: ClassVar[bool] = False
    recomputes: ClassVar[bool] = False
    moves: ClassVar[bool] = False
    rewrites: ClassVar[bool] = False
    lossless: ClassVar[bool] = True
    optimal: ClassVar[str] = ""
    needs: ClassVar[frozenset[Needed]] = frozenset()
    solver: ClassVar[str] = ""
    warm_up: ClassVar[Annotated[int, Ge(0)]] = 0
    manages: ClassVar[tuple[Managed, ...]] = ("activations",)
    yields: ClassVar[tuple[Managed, ...]] = ()
    fidelity: ClassVar[Fidelity] = "reconstruction"
    splits_batch: ClassVar[bool] = False
    plans_ahead: ClassVar[str] = ""
    slow: ClassVar[bool] = False
    plans_from: ClassVar[PlansFrom] = "problem"
    saves: ClassVar[Mapping[Annotated[str, OneOf(SAVINGS)], str]] = MappingProxyType({})
    other_values: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    unseen: ClassVar[Mapping[str, str]] = MappingProxyType({})
    rarely: ClassVar[str] = ""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        _check_traits(cls)
        relations = vars(cls).get("__post_init__")
        if relations is not None:

            @functools.wraps(relations)
            def check(self: Policy, *given: Any) -> None:
                Policy.__post_init__(self)
                relations(self, *given)

            cls.__post_init__ = check  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        """Hold each parameter that is not the default against its declaration. Raises PolicyError."""
        declared = declarations(type(self))
        for field in fields(self):
            value = getattr(self, field.name, field.default)
            if value is not field.default and not allows(declared[field.name], value):
                raise PolicyError(_refused(type(self), field.name, value, declared[field.name]))

    @classmethod
    def said_of_parameters(cls, trait: str) -> Mapping[str, Any]:
        """What a class and its bases say in `other_values` or `unseen`."""
        return {key: value for base in reversed(cls.__mro__) for key, value in vars(base).get(trait, {}).items()}

    @classmethod
    def saving_lines(cls) -> tuple[str, ...]:
        """What `saves` declares, a line each, for whoever reads its results."""
        return tuple(f"declared saving: {kind}: {why}" for kind, why in cls.saves.items())

    def __add__(self, other: Policy) -> Policy:
        """Both on one job, each for the tensors that it manages; see `sim.policies.composition`."""
        return _join((self, other), "")

    def on(self, selector: str) -> Policy:
        """This policy for the tensors alone that a selector names, such as "layers 0-7" or "*.attn"."""
        return _join((self,), selector)

    def plan(self, problem: Problem) -> Plan:
        """The plan for one iteration. Raises PolicyError on an unmet need, Infeasible with a proof."""
        raise NotImplementedError(f"{type(self).__name__} does not define plan(problem)")

    def too_long(self, trace: Trace) -> str:
        """Why this policy refuses a trace for its number of ops alone, whatever the budget; "" if it does not."""
        return ""

    def in_class(self, plan: Plan) -> bool:
        """Whether a plan belongs to the class that `optimal` names; none does where that names none."""
        return False

    def unlimited(self, problem: Problem) -> Mapping[str, Plan]:
        """What this policy's freedoms are worth where memory has no limit: plans by a short name of the freedom.

        For policies that may change how long the work itself takes: faster implementations, captured launches, an
        optimizer beside the device. The fastest of these plans, or keeping everything where that is faster, is what
        the policy's overhead is measured against. problem: as for `plan`, on a platform whose home tiers never fill.
        """
        return {}


def label(policy: Policy) -> str:
    """A policy as it is written: its name, or that of its class, and the parameters that are not the defaults."""
    if (text := getattr(policy, "text", None)) is not None:
        return str(text)
    values = {field.name: getattr(policy, field.name) for field in fields(policy)}
    changed = {field.name: values[field.name] for field in fields(policy) if _differs(values[field.name], field)}
    return text_of(own_name(type(policy)), changed)


def _differs(value: Any, field: Field[Any]) -> bool:
    try:
        return bool(value != default_of(field))
    except Exception:  # an array is neither equal nor not
        return True


def own_name(policy: type[Policy]) -> str:
    """How messages call a policy: by its file if it is one of ours, else by its class."""
    return policy.__module__.rpartition(".")[2] if policy.__module__.startswith("sim.policies.") else policy.__name__


def default_of(field: Field[Any]) -> Any:
    """What a parameter is where it is not given."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _refused(policy: type[Policy], name: str, value: Any, declared: Any) -> str:
    return f"policy {own_name(policy)!r}: {name} is {value!r}; expected {expected(declared)}{hint(declared, value)}"


def check_decided(policy: Policy) -> None:
    """Refuse traits that properties decide, where one raises or is none of its values. Raises PolicyError."""
    for name, declared in TRAITS.items():
        if isinstance(getattr(type(policy), name), (property, functools.cached_property)):
            try:
                value = getattr(policy, name)
            except Exception as error:
                text = f"policy {own_name(type(policy))!r}: {name}: {type(error).__name__}: {error}"
                raise PolicyError(" ".join(text.split())) from error
            if not allows(declared, value):
                raise PolicyError(_refused(type(policy), name, value, declared))


def _check_traits(policy: type[Policy]) -> None:
    """Refuse class attributes that are not traits, and impossible values of traits. Raises PolicyError."""
    known, own = TRAITS, declarations(policy)
    for name, value in vars(policy).items():
        if name.startswith("_") or callable(value) or hasattr(value, "__get__"):
            continue  # a property is a trait that a parameter decides
        if name in known and is_trait(own[name]):
            if not allows(known[name], value):
                raise PolicyError(_refused(policy, name, value, known[name]))
        elif name not in own and name.islower():
            raise PolicyError(
                f"policy {own_name(policy)!r}: {name} is not a trait{near(name, known)}; a parameter needs its type, "
                f"as in `{name}: {type(value).__name__} = {value!r}`, and a constant a name in capitals"
            )


def _traits() -> dict[str, Any]:
    """What each trait may be."""
    return {name: get_args(said)[0] for name, said in declarations(Policy).items() if is_trait(said)}


TRAITS: Mapping[str, Any] = MappingProxyType(_traits())
"""The traits, and what each may be."""

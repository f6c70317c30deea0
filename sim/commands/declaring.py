"""How options are declared: once for all commands that take them, with help that lists what the registries hold."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from types import UnionType
from typing import Any, NamedTuple, TextIO, get_args, get_origin

from typer.core import TyperCommand, TyperGroup

TYPED = "sim.commands.typed"
"""The key of a context's `meta` under which are the words that its command has to read."""


class Option(NamedTuple):
    """One option of a command.

    name: in Python.
    type: its annotation, with `typer.Option`.
    default: its value if it is not given; an option without a default is required.
    """

    name: str
    type: Any
    default: Any = inspect.Parameter.empty

    @property
    def kind(self) -> type:
        """The type of a value that is given: `str` for `str | None`, `list` for `list[str]`."""
        given = get_args(self.type)[0]
        kind = get_args(given)[0] if isinstance(given, UnionType) else given
        return get_origin(kind) or kind


def takes(*options: Option) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare the options of a command, in order; it gets them by name, as `**options`, in that order."""

    def declare(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(*args: Any, **given: Any) -> None:
            chosen = {o.name: given.pop(o.name, o.default) for o in options}
            with _answers_alone() if chosen.get("json") else nullcontext():
                command(*args, **chosen, **given)

        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        keyword = inspect.Parameter.KEYWORD_ONLY
        shared = [inspect.Parameter(o.name, keyword, default=o.default, annotation=o.type) for o in options]
        del call.__wrapped__
        call.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in (*own, *shared)}
        return call

    return declare


_answers: ContextVar[TextIO | None] = ContextVar("answers", default=None)
"""Where answers go while whatever else is printed goes to standard error."""


@contextmanager
def _answers_alone() -> Iterator[None]:
    """Standard output is for answers meanwhile: what a policy of one's own prints goes to standard error."""
    token = _answers.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _answers.reset(token)


def answer(text: str) -> None:
    """Print what a command was asked for."""
    print(text, file=_answers.get() or sys.stdout)


def defaults(options: Collection[Option]) -> dict[str, Any]:
    """The defaults of options by name; required ones are left out."""
    return {option.name: option.default for option in options if option.default is not inspect.Parameter.empty}


class Group(TyperGroup):
    """Commands under a name of their own; what a wrong word may stand for says `mistakes`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "suggest_commands": False})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the first word names."""
        ctx.meta[TYPED] = tuple(args)
        return super().resolve_command(ctx, args)


class Command(TyperCommand):
    """A command whose help lists what the registries hold: `{optimizer}` stands for the names of all optimizers."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, filled in."""
        for option in self.params:
            option.help = filled(getattr(option, "help", None) or "")  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command; an option of `BARE` may stand without its value."""
        words: list[str] = []
        for i, word in enumerate(args):
            words.append(word)
            values = BARE.get(word, ())
            if values and (i + 1 == len(args) or args[i + 1] not in values):
                if i + 1 < len(args) and not args[i + 1].startswith("-"):
                    continue  # a wrong value, which is refused by name
                words.append(values[0])
        ctx.meta[TYPED] = tuple(words)
        return super().parse_args(ctx, words)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; whatever it calls of a policy has the limits that were given, or the usual ones.

        What it would write must replace nothing that it reads.
        """
        from sim.commands.overwriting import check_outputs
        from sim.limits import RUN_SECONDS, usually_limited

        check_outputs(ctx.params)
        seconds, actions = ctx.params.get("time_limit", RUN_SECONDS), ctx.params.get("most_actions")
        more = "--time-limit allows more" if "time_limit" in ctx.params else ""
        with usually_limited(seconds, actions=actions, more=more):
            return super().invoke(ctx)


FORMATS = ("png", "svg", "pdf")
"""Formats of figures; the first is the default."""

BARE: Mapping[str, Sequence[str]] = {"--figures": FORMATS}
"""Options that may be given without a value, which then is the first of these."""


def filled(text: str) -> str:
    """A text in which `{name}` is replaced by the names that the registry of that name holds."""
    return re.sub(r"\{(\w+)\}", lambda match: ", ".join(REGISTRIES[match[1]]()), text)


def _axis(name: str) -> Callable[[], Collection[str]]:
    def names() -> Collection[str]:
        from workloads.transformer import CHOICES

        return CHOICES[name]

    return names


def _schedules() -> Collection[str]:
    from sim.rewrites.schedules import SCHEDULES

    return SCHEDULES


def _validated() -> Collection[str]:
    from sim.measure.validate import PRECISIONS

    return PRECISIONS


def _analyses() -> Collection[str]:
    from sim.analysis.registry import analyses

    return analyses()


def _goals() -> Collection[str]:
    from sim.advice.question import GOALS

    return GOALS


def _frameworks() -> Collection[str]:
    from sim.applying import TARGETS

    return TARGETS


REGISTRIES: Mapping[str, Callable[[], Collection[str]]] = {
    "schedule": _schedules,
    **{name: _axis(name) for name in ("precision", "attention", "optimizer", "loss", "stack", "frozen_dtype")},
    "validated": _validated,
    "analyses": _analyses,
    "goals": _goals,
    "frameworks": _frameworks,
}
"""The registries that help may list; imported only when help is printed."""

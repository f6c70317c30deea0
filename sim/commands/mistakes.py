"""Mistakes in the words of a command line: each message says what would be right."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from sim.commands.declaring import REGISTRIES, TYPED, filled

LOOKED_FOR = {"largest-batch": "batch", "smallest-budget": "budget"}
"""What a command finds itself, so that it has no option for it."""

FILES = {".jsonl": "trace", ".et": "trace", ".toml": "profile", ".json": "model"}
"""Files by their ending, and the options that take them."""


def explained(error: typer.TyperException) -> str:
    """The message of a mistake in the words that were typed, with what would be right."""
    context: Any = getattr(error, "ctx", None)
    said = error.format_message()
    if context is None:
        return said
    if hasattr(error, "possibilities"):
        return _unknown_option(error, context)
    if said.startswith("No such command"):
        return said.removesuffix(".") + _nearest_command(context)
    missing = getattr(error, "param", None) if said.startswith("Missing") else None
    if missing is None and not said.startswith("Got unexpected extra argument"):
        return said
    if missing is not None and getattr(missing, "help", None):
        said = f"{said.removesuffix('.')}: {filled(missing.help)}"
    stray = _stray(context)
    places = [place for word in stray if (place := _place(word, stray, context))]
    found = "; ".join(dict.fromkeys(f"{text}: {' '.join(words)}" for _, text, words in places))
    if not found:
        return said
    return found if missing is None or missing.name in {param.name for param, *_ in places} else f"{said}. {found}"


def _nearest_command(context: Any) -> str:
    """What a word may stand for where a command is expected."""
    from sim.errors import nearest

    word, commands = context.meta[TYPED][0], context.command.commands
    group = f"tiersim {context.info_name}" if context.parent else "tiersim"
    inside = {name: command.commands for name, command in commands.items() if hasattr(command, "commands")}
    if whole := [f"`tiersim {name} {word}`" for name, own in inside.items() if word in own]:
        return f". Did you mean {' or '.join(whole)}?"
    if f"--{word}" in {name for param in context.command.params for name in param.opts}:
        return f". Did you mean '--{word}'?"
    if near := nearest(word, commands):
        return f". Did you mean {', '.join(map(repr, near))}?"
    if "show" in commands and (Path(word).suffix or os.path.exists(word)):
        return f". Did you mean `{group} show {shlex.quote(word)}`?"
    return f". `{group} --help` lists all."


# ---- words without an option ---------------------------------------------------------------------


def _stray(context: Any) -> list[str]:
    """The words that belong to no option and no argument of the command."""
    return list(context.command.make_parser(context).parse_args(list(context.meta[TYPED]))[1])


def _place(word: str, stray: list[str], context: Any) -> tuple[Any, str, list[str]] | None:
    """The option that takes a word: its parameter, what the word is, and how it is given; None where none does.

    stray: it and the others without an option.
    """
    for param in context.command.params:
        names = set(_names(param)) if param.param_type_name == "option" else ()
        if word in names:
            noun = {"policies": "policy", "profile": "hardware profile"}.get(param.name, param.name)
            given = [_option(param), shlex.quote(word)]
            if "--policies" in param.opts:
                several = [*filter(None, [_value(param, context)]), *(each for each in stray if each in names)]
                if len(several) > 1:
                    return param, "policies are separated by commas", [given[0], shlex.quote(",".join(several))]
            return param, f"{word!r} is {'an' if noun[0] in 'aeiou' else 'a'} {noun}", given
        if param.name == FILES.get(Path(word).suffix):
            return param, f"{word!r} is a file", [_option(param), shlex.quote(word)]
        if param.name == "param" and re.fullmatch(r"\w+=.+", word):
            return param, f"{word!r} is a parameter of a policy", ["-p", shlex.quote(word)]
    return None


def _option(param: Any) -> str:
    return str(max(param.opts, key=len))


def _names(param: Any) -> Iterator[str]:
    """The names that an option takes."""
    if param.name == "profile":
        from sim.hardware.profile import profile_names

        yield from profile_names()
    elif param.name == "model":
        from workloads.models import HUB_NAMES, model_names

        yield from (*model_names(), *HUB_NAMES)
    elif param.name in ("policy", "policies"):
        from sim.policies import names

        yield from names()
    else:
        for registry in re.findall(r"\{(\w+)\}", getattr(param, "help", None) or ""):
            yield from REGISTRIES[registry]()


def _value(param: Any, context: Any) -> str:
    """What was typed for an option, "" for nothing."""
    words = context.meta[TYPED]
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in param.opts:
            return str(value if equals else "".join(words[i + 1 : i + 2]))
    return ""


# ---- options that there are not ------------------------------------------------------------------


def _unknown_option(error: Any, context: Any) -> str:
    """The message for an option that there is not: how its value is given, or the nearest options."""
    from sim.errors import nearest

    params = [param for param in context.command.params if param.param_type_name == "option"]
    options = {name.lstrip("-"): param for param in params for name in param.opts}
    written = {name.lstrip("-"): name for param in params for name in param.opts}
    wrong, value = _as_typed(error.option_name, context)
    if wrong != error.option_name and not nearest(wrong.lstrip("-"), options):
        wrong = error.option_name  # letters, each of them an option
    bare, command = wrong.lstrip("-"), str(context.info_name)
    looked_for = LOOKED_FOR.get(command)
    close = nearest(bare, [*options, *([looked_for] if looked_for else [])])
    if looked_for in close:
        return f"{wrong}: this is what {command} looks for; `tiersim advise` takes one"
    said = f"No such option: {wrong}"
    if hint := _parameter(bare, value, context):
        return f"{said} ({hint})"
    if bare not in close and (place := _place(bare, [bare], context)):
        return f"{said} ({place[1]}: {' '.join(place[2])})"
    place = _place(value, [value], context) if value else None
    if place and value in _names(place[0]) and not any(value in _names(options[name]) for name in close):
        return f"{said} ({place[1]}: {' '.join(place[2])})"
    names = sorted(written[name] for name in _taking(value, close, options, context))
    return f"{said} (Possible options: {', '.join(names)})" if names else said


def _as_typed(name: str, context: Any) -> tuple[str, str]:
    """An option as it was typed, and its value, "" for none: of `-model` the parser names `-m` alone."""
    words = context.meta.get(TYPED, ())
    for i, word in enumerate(words):
        typed, equals, value = word.partition("=")
        one_dash = len(name) == 2 and typed[:1] == "-" and typed[1:2] not in ("", "-") and name[1] in typed
        if typed == name or (one_dash and len(typed) > 2):
            following = "".join(words[i + 1 : i + 2])
            return typed, value if equals else "" if following.startswith("--") else following
    return name, ""


def _taking(value: str, names: list[str], options: dict[str, Any], context: Any) -> list[str]:
    """Of several options those that take a value; a number is first of all for those that take numbers."""
    if not value or len(names) < 2:
        return names
    taken = {}
    for name in names:
        try:
            taken[name] = options[name].process_value(context, value)
        except typer.BadParameter:
            continue
    return [name for name, cast in taken.items() if not isinstance(cast, str)] or [*taken] or names


def _parameter(name: str, value: str, context: Any) -> str:
    """How a parameter of a policy that was given is given; "" for what is none."""
    from sim.commands.options import names_of
    from sim.errors import TiersimError
    from sim.policies import load, parameters_of, policy_file

    key = name.replace("-", "_")
    for param in context.command.params:
        if param.name not in ("policy", "policies"):
            continue
        for policy in names_of(_value(param, context) or None) or ():
            if policy_file(policy) is not None:
                continue  # what is only asked about is not executed
            try:
                known = parameters_of(load(policy))
            except TiersimError:
                continue
            if key in known:
                call = shlex.quote(f"{policy}({key}={value or '…'})")
                return f"a parameter of policy {policy!r}: {_option(param)} {call}"
    return ""

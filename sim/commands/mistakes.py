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

ALL = ("list", "ls", "all")
"""Words that ask for all that there is."""

LISTS = {"profiles": "profile", "policies": "policy", "models": "model"}
"""Commands that list all without a word, and what they print one of."""

UNIT = r"(?i)[kmgt]?i?b(/s)?|[mun]?s|min|%"
"""What follows a number and belongs to it."""

MOST_OTHERS = 4
"""Of other commands that have an option so many are named."""

OUTPUT = ("csv", "format", "output-format", "excel", "top")
"""What other tools have for the form of their output."""

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
    if hint := _in_parts(context):
        return hint
    if missing is None and not said.startswith("Got unexpected extra argument"):
        return said + _nearest_number(getattr(error, "param", None), context)
    if missing is not None and getattr(missing, "help", None):
        said = f"{said.removesuffix('.')}: {filled(missing.help)}"
    stray = _stray(context)
    places = [place for word in stray if (place := _place(word, stray, context))]
    found = "; ".join(dict.fromkeys(f"{text}: {' '.join(words)}" for _, text, words in places))
    if not found:
        return said if missing else said + _too_many(stray, context)
    return found if missing is None or missing.name in {param.name for param, *_ in places} else f"{said}. {found}"


def _nearest_command(context: Any) -> str:
    """What a word may stand for where a command is expected."""
    from sim.errors import nearest

    word, commands = context.meta[TYPED][0], context.command.commands
    group = f"tiersim {context.info_name}" if context.parent else "tiersim"
    if word in ALL and "list" not in commands and not context.parent:
        return f". {_lists(commands)}"
    inside = {name: command.commands for name, command in commands.items() if hasattr(command, "commands")}
    for first, second in zip(parts := re.split("[-_]", word), parts[::-1]):  # "show-trace"
        if len(parts) == 2 and second in inside.get(first, ()):
            return f". Did you mean `tiersim {first} {second}`?"
    if whole := [f"`tiersim {name} {word}`" for name, own in inside.items() if word in own]:
        return f". Did you mean {' or '.join(whole)}?"
    if f"--{word}" in {name for param in context.command.params for name in param.opts}:
        return f". Did you mean '--{word}'?"
    if near := nearest(word, commands):
        return f". Did you mean {', '.join(map(repr, near))}?"
    if "show" in commands and (Path(word).suffix or os.path.exists(word)):
        return f". Did you mean `{group} show {shlex.quote(word)}`?"
    return f". `{group} --help` lists all."


def _lists(commands: Any) -> str:
    """The commands that list what there is."""
    found = [f"`tiersim {name}`" for name in LISTS if name in commands]
    return f"{', '.join(found)} list what there is, `tiersim results list` what sweeps have left"


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


def _in_parts(context: Any) -> str:
    """How a value is given that was typed as two words, or several values as several; "" where none was."""
    words = list(context.meta[TYPED])
    options = {name: param for param in context.command.params for name in param.opts if name.startswith("-")}
    for i, word in enumerate(words):
        name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        rest = words[i + 1 :] if equals else words[i + 2 :]
        value = value if equals else "".join(words[i + 1 : i + 2])
        if name not in options or getattr(options[name], "is_flag", False):
            continue
        following = rest[0] if rest else ""
        if re.search(r"(^|=)[\d.]+$", value) and re.fullmatch(UNIT, following):
            return f"{value} {following} is one value: {name} {shlex.quote(f'{value} {following}')}"
        several = f"{value} {following}" if re.fullmatch(r"\d+", following) else value
        if re.fullmatch(r"\d+([, ]\d+)+", several) and _takes_number(options[name], context):
            return f"{name} {several}: expected one number; `tiersim sweep` takes several"
    return ""


def _takes_number(param: Any, context: Any) -> bool:
    try:
        return isinstance(param.process_value(context, "1"), int)
    except typer.BadParameter:
        return False


def _nearest_number(param: Any, context: Any) -> str:
    """The end of a message about the value of an option that takes a number: the nearest one that it takes."""
    from sim.errors import closest

    if param is None:
        return ""
    least = param.min if getattr(param, "min", None) is not None else 1
    try:
        taken = param.process_value(context, str(least))
    except typer.BadParameter:
        return ""
    value = _value(param, context)
    return closest(value, least, whole=isinstance(taken, int)) if type(taken) in (int, float) else ""


def _too_many(stray: list[str], context: Any) -> str:
    """What to do about words that a command has no place for; "" where that is not known."""
    arguments = [param.name for param in context.command.params if param.param_type_name == "argument"]
    if len(arguments) == 1:
        return f": `tiersim {context.info_name}` takes one {LISTS.get(context.info_name, arguments[0])}"
    compare = context.find_root().command.commands.get("compare")
    if compare is None or context.command is compare:
        return ""
    for word in stray:
        for param in compare.params:
            if word in set(_names(param)):
                return f": `tiersim compare` takes {_option(param)} {shlex.quote(word)}"
    return ""


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
    """What was typed for an option, the last of several values, "" for nothing."""
    words, found = context.meta[TYPED], ""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in param.opts:
            found = str(value if equals else "".join(words[i + 1 : i + 2]))
    return found


# ---- options that there are not ------------------------------------------------------------------


def _unknown_option(error: Any, context: Any) -> str:
    """The message for an option that there is not: how its value is given, or the nearest options."""
    from sim.errors import ELSEWHERE, nearest

    params = [param for param in context.command.params if param.param_type_name == "option"]
    options = {name.lstrip("-"): param for param in params for name in param.opts}
    written = {name.lstrip("-"): name for param in params for name in param.opts}
    wrong, value = _as_typed(error.option_name, context)
    if wrong != error.option_name and not nearest(wrong.lstrip("-"), options):
        wrong = error.option_name  # letters, each of them an option
    bare, command = wrong.lstrip("-"), str(context.info_name)
    looked_for = LOOKED_FOR.get(command)
    close = nearest(bare, [*options, *([looked_for] if looked_for else [])])
    if looked_for in (*close, bare.removesuffix("s"), bare.removesuffix("es")):
        return f"{wrong}: this is what {command} looks for; `tiersim advise` takes one"
    said = f"No such option: {wrong}"
    if bare in ALL and (listing := _listing(context)):
        return f"{said} ({listing})"
    arguments = {param.name for param in context.command.params if param.param_type_name == "argument"}
    if bare in arguments:
        return f"{said} (given without its name: tiersim {command} {shlex.quote(value) if value else '…'})"
    if hint := _parameter(bare, value, context):
        return f"{said} ({hint})"
    if bare not in close and (place := _place(bare, [bare], context)):
        return f"{said} ({place[1]}: {' '.join(place[2])})"
    place = _place(value, [value], context) if value else None
    if place and value in _names(place[0]) and not any(value in _names(options[name]) for name in close):
        return f"{said} ({place[1]}: {' '.join(place[2])})"
    if bare in OUTPUT and "out" in options:
        return f"{said} (all is printed: --json for programs; -o DIR writes tables and figures)"
    if known := [name for name in ELSEWHERE.get(bare.replace("-", "_"), ()) if name in _policies(context)]:
        return f"{said} (policies do that: {' or '.join(known)})"
    if names := sorted(written[name] for name in _taking(value, close, options, context)):
        return f"{said} (Possible options: {', '.join(names)})"
    others = _others_with(bare, context)
    return f"{said} (an option of {', '.join(others)})" if others else said


def _listing(context: Any) -> str:
    """How a command, or a group of them, lists all; "" where it has nothing to list."""
    if context.info_name in LISTS:
        return f"`tiersim {context.info_name}` alone lists all"
    commands = getattr(context.command, "commands", {})
    if "list" in commands:
        return f"`tiersim {context.info_name} list`"
    return _lists(commands) if commands and not context.parent else ""


def _policies(context: Any) -> set[str]:
    """The policies that an option of the command takes."""
    return {name for param in context.command.params if param.name in ("policy", "policies") for name in _names(param)}


def _others_with(bare: str, context: Any) -> list[str]:
    """Other commands that have an option, as they are typed."""
    found = []
    for name, command in context.find_root().command.commands.items():
        for inner, each in getattr(command, "commands", {"": command}).items():
            if each is not context.command and any(f"--{bare}" in param.opts for param in each.params):
                found.append(f"`tiersim {name}{' ' if inner else ''}{inner}`")
    return found[:MOST_OTHERS]


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

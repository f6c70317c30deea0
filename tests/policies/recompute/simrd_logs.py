"""Random logs of the prototype's format, and the log that an import stands for."""

from __future__ import annotations

from random import Random
from typing import Any

Row = dict[str, Any]


def random_log(
    draw: Random, calls: int, *, views: bool = True, most: int = 90, repeat: bool = True, dense: bool = False
) -> list[Row]:
    """Calls, views of views, several results, mutations, second names, late and lacking releases, constants.

    most: sizes and times are 1 to this; few make ties. repeat: a call may name an argument twice. dense: many views of
    what is not a constant, whose storages are evicted and which are read later, sizes from 0 on, and late constants.
    """
    rows: list[Row] = [{"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}]
    names: list[str] = []
    count = 0

    def add(kind: str, **fields: object) -> None:
        rows.append({"INSTRUCTION": kind, **fields})

    def fresh() -> str:
        nonlocal count
        count += 1
        return f"x{count}"

    def constant() -> None:
        names.append(fresh())
        add("CONSTANT", NAME=names[-1])
        add("MEMORY", NAME=names[-1], MEMORY=str(draw.randint(1, most)))

    def call(args: list[str], aliases: list[int]) -> None:
        made = [fresh() for _ in aliases]
        add("CALL", NAME="f", ARGS=args, RESULT=made, TIME=str(draw.randint(0 if draw.random() < 0.1 else 1, most)))
        for name, alias in zip(made, aliases, strict=True):
            add("MEMORY", NAME=name, MEMORY=str(draw.randint(0 if dense else 1, most)))
            add("ALIAS", NAME=name, ALIAS=str(alias))
        names.extend(made)

    constant()
    constant()
    kinds = ("call",) * 7 + ("mutate", "mutate", "copy", "copy_from") + ("view", "view", "mixed") * views
    if dense:
        kinds = ("call",) * 5 + ("view",) * 4 + ("mixed", "mutate")
    for _ in range(calls):
        if dense and draw.random() < 0.1:
            constant()
        known = names[2:] if dense and len(names) > 4 else names
        args = draw.sample(known, min(len(known), draw.randint(1, 2 if dense else 3)))
        kind = draw.choice(kinds)
        if kind == "mutate":
            places = draw.sample(range(len(args)), draw.randint(1, min(2, len(args))))
            add("MUTATE", NAME="add_", ARGS=args, MUTATE=places, TIME=str(draw.randint(1, most)))
        elif kind == "copy":
            names.append(fresh())
            add("COPY", DST=names[-1], SRC=args[0])
        elif kind == "copy_from" and len(args) > 1:
            add("COPY_FROM", DST=args[0], SRC=args[1])
        elif kind == "view":
            call(args, [draw.randrange(len(args)) for _ in range(draw.choice((1, 1, 2)))])
        elif kind == "mixed":
            call(args, [-1, draw.randrange(len(args))])
        else:
            call(args + args[:1] * (repeat and draw.random() < 0.1), [-1] * draw.choice((1, 1, 1, 2, 3)))
        while len(names) > (12 if dense else 6) and draw.random() < 0.7:
            add("RELEASE", NAME=names.pop(draw.randrange(2, len(names))))
    # the last call waits for nothing and takes time: all that the calls before it cause has then been seen
    call(names[-1:], [-1])
    call(names[-1:], [-1])
    rows[-3]["TIME"] = str(draw.randint(1, most))
    return rows


def log_of(*lines: str) -> list[Row]:
    """A log by hand: `w 4 = constant`, `a 10 = f w`, `v a = f a` (v is a view of a), `release a`. A call takes 10."""
    rows: list[Row] = []
    for line in lines:
        if line.startswith("release "):
            rows.append({"INSTRUCTION": "RELEASE", "NAME": line.split()[1]})
            continue
        left, right = line.split(" = ")
        (name, size), (call, *args) = left.split(), right.split()
        alias = args.index(size) if size in args else -1
        memory: Row = {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": "0" if alias >= 0 else size}
        if call == "constant":
            rows += [{"INSTRUCTION": "CONSTANT", "NAME": name}, memory]
            continue
        rows.append({"INSTRUCTION": "CALL", "NAME": call, "ARGS": args, "RESULT": [name], "TIME": "10"})
        rows += [memory, {"INSTRUCTION": "ALIAS", "NAME": name, "ALIAS": str(alias)}]
    return rows


def as_imported(rows: list[Row]) -> list[Row]:
    """The log that tiersim takes a log for: a constant has a second name that is never released."""
    out: list[Row] = []
    for row in rows:
        out.append(row)
        if len(out) > 1 and out[-2]["INSTRUCTION"] == "CONSTANT":
            out.append({"INSTRUCTION": "COPY", "DST": f"kept {row['NAME']}", "SRC": row["NAME"]})
    return out

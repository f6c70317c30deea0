"""Random logs of the prototype's format, and the log that an import stands for."""

from __future__ import annotations

from random import Random
from typing import Any

Row = dict[str, Any]


def random_log(draw: Random, calls: int, *, views: bool = True, most: int = 90, repeat: bool = True) -> list[Row]:
    """Calls, views of views, several results, mutations, second names, late and lacking releases, constants.

    most: sizes and times are 1 to this; few make ties. repeat: a call may name an argument twice.
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
            add("MEMORY", NAME=name, MEMORY=str(draw.randint(1, most)))
            add("ALIAS", NAME=name, ALIAS=str(alias))
        names.extend(made)

    constant()
    constant()
    kinds = ("call",) * 7 + ("mutate", "mutate", "copy", "copy_from") + ("view", "view", "mixed") * views
    for _ in range(calls):
        args = draw.sample(names, min(len(names), draw.randint(1, 3)))
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
        while len(names) > 6 and draw.random() < 0.7:
            add("RELEASE", NAME=names.pop(draw.randrange(2, len(names))))
    # the last call waits for nothing and takes time: all that the calls before it cause has then been seen
    call(names[-1:], [-1])
    call(names[-1:], [-1])
    rows[-3]["TIME"] = str(draw.randint(1, most))
    return rows


def folded(rows: list[Row]) -> list[Row]:
    """The log that tiersim takes a log for: a view is a second name, and constants are there and stay.

    The time of a call that makes views alone goes to the call that made the storage, of a constant's to the call
    before. Where a log has no views and its constants come first and stay, nothing changes.
    """
    constants: list[Row] = []
    out: list[Row] = []
    maker: dict[str, Row] = {}  # name -> the row that made its storage, if a row did
    latest: Row | None = None
    owed = 0
    at = 0
    while at < len(rows):
        row = dict(rows[at])
        at += 1
        kind = row["INSTRUCTION"]
        if kind == "CONSTANT":
            constants += [row, rows[at], {"INSTRUCTION": "COPY", "DST": f"kept {row['NAME']}", "SRC": row["NAME"]}]
            maker.pop(row["NAME"], None)
            at += 1
            continue
        if kind in ("COPY", "COPY_FROM"):
            maker.pop(row["DST"], None)
            if row["SRC"] in maker:
                maker[row["DST"]] = maker[row["SRC"]]
        if kind not in ("CALL", "MUTATE"):
            out.append(row)
            continue
        lines = [(rows[at + 2 * i], rows[at + 2 * i + 1]) for i in range(len(row.get("RESULT", ())))]
        at += 2 * len(lines)
        aliases = [int(alias["ALIAS"]) for _, alias in lines]
        names = [memory["NAME"] for memory, _ in lines]
        seconds = [(n, row["ARGS"][a]) for n, a in zip(names, aliases, strict=True) if a >= 0]
        if kind == "MUTATE" or len(seconds) < len(lines):
            row["TIME"] = str(int(row["TIME"]) + owed)
            owed, latest = 0, row
            for name in [row["ARGS"][place] for place in row.get("MUTATE", ())] + names:
                maker[name] = row
            if lines:
                row["RESULT"] = [n for n, a in zip(names, aliases, strict=True) if a < 0]
            out.append(row)
            out += [line for pair, a in zip(lines, aliases, strict=True) if a < 0 for line in pair]
        else:
            pays = maker.get(seconds[0][1], latest)
            if pays is None:
                owed += int(row["TIME"])
            else:
                pays["TIME"] = str(int(pays["TIME"]) + int(row["TIME"]))
        for name, base in seconds:
            out.append({"INSTRUCTION": "COPY", "DST": name, "SRC": base})
            maker.pop(name, None)
            if base in maker:
                maker[name] = maker[base]
    start = [row for row in out if row.get("ANNOTATION") == "START"]
    return start + constants + [row for row in out if row not in start]

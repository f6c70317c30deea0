"""Writes the tables of hardware_profiles/README.md: the shipped profiles, and the keys that a profile may have.

python scripts/make_profiles.py

What each key means stands in the docstrings of `sim/hardware/schema.py`; what each machine is, in its profile.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from pathlib import Path

from sim.hardware import fit_error, load_profile, profile_names
from sim.hardware.platform import STANDINGS
from sim.hardware.schema import PARTS, Model, ProfileFile, Sourced

TARGET = Path(__file__).resolve().parents[1] / "hardware_profiles" / "README.md"


def page(text: str) -> str:
    """The page with its tables as they have to be. text: the page as it is."""
    tables = {"shipped": shipped(), "keys of a file": keys_of(ProfileFile)}
    tables |= {f"keys of {name}": keys_of(part) for name, part in PARTS.items()}
    marks = re.findall(r"<!-- (?!end)(.*?) -->", text)
    if sorted(marks) != sorted(tables):
        raise ValueError(f"{TARGET.name} has places for {sorted(marks)}, and there are {sorted(tables)}")
    for name, table in tables.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}{mark}\n{table}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


def shipped() -> str:
    """The shipped profiles, with how many of their figures have which standing."""
    rows = []
    for name in profile_names():
        platform = load_profile(name)
        counts = Counter(fact.standing for fact in platform.facts)
        error = fit_error(platform)
        fit = "no measurement" if error is None else f"{100 * error:.2g} %"
        rows.append([f"`{name}`", platform.description, fit, *(str(counts[standing]) for standing in STANDINGS)])
    return _table(["profile", "machine", "GEMMs off by", *STANDINGS], rows)


def keys_of(model: type[Model]) -> str:
    """The keys of a part, each with what it means. Raises ValueError where the part does not say so."""
    said = meanings(model)
    rows = []
    for name, field in model.model_fields.items():
        key = field.alias or name
        if name in ("source", "standing"):
            continue
        if key not in said:
            raise ValueError(f"{model.__name__} in sim/hardware/schema.py does not say what {key!r} means")
        figures = issubclass(model, Sourced)
        mark = (
            " *f*" if figures and name in model.FIGURES else " *table of f*" if figures and name in model.TABLES else ""
        )
        rows.append([f"`{key}`{mark}", f"{'required: ' if field.is_required() else ''}{said[key]}"])
    return _table(["key", "meaning"], rows)


def meanings(model: type[Model]) -> dict[str, str]:
    """What the docstring of a part says of each of its keys: `key: meaning`, further lines indented."""
    doc = inspect.cleandoc(model.__doc__ or "")
    entries = re.findall(r"(?m)^([a-z_]+): (.*(?:\n {4}.*)*)", doc)
    return {key: " ".join(text.split()) for key, text in entries}


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    TARGET.write_text(page(TARGET.read_text(encoding="utf-8")), encoding="utf-8")

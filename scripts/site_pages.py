"""Pages of the site that are made from the program: policies, machines, the reference, the command line, notebooks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from site_docstrings import as_markdown
from site_notebooks import page_of

from workloads.importers.any_format import FORMATS

ROOT = Path(__file__).resolve().parent.parent
Pages = dict[str, str | bytes]
"""Path in the site -> Markdown, or the bytes of a picture."""

FAMILY_TITLES = {
    "baseline": "Baseline",
    "recompute": "Recomputation",
    "offload": "Offload",
    "state": "Model state",
    "hybrid": "Hybrid",
    "compression": "Compression",
    "parallel": "Parallel",
}
REFERENCE = {
    "sim": ("sim",),
    "Workloads": ("workloads",),
    "Machines": ("sim.hardware",),
    "Traces": ("sim.trace", "sim.trace.columns", "sim.trace.chain", "sim.rewrites.rewrite"),
    "Importers": (
        "workloads.importers.any_format",
        *(module for module in FORMATS.values() if module.startswith("workloads.")),
        "workloads.exporters.chakra",
    ),
    "Analyses": ("sim.analysis",),
    "Reports": (
        "sim.report.plot",
        "sim.report.lanes",
        "sim.report.sweep_plots",
        "sim.report.draw",
        "sim.report.timeline",
    ),
    "Sweeps": ("sim.sweeps",),
    "Export to frameworks": ("sim.applying",),
    "Conformance": ("sim.conformance",),
    "Units and errors": ("sim.units", "sim.errors"),
}
"""Pages of the reference, and the modules on each; what stands on an earlier page is not repeated."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; cells may hold any text."""
    lines = [header, ["---"] * len(header), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    code_apart = re.split(r"(`[^`]*`)", text.replace("\n", " "))  # in code nothing is escaped, and a bar ends no cell
    code_apart[::2] = [part.replace("|", "\\|").replace("<", "&lt;") for part in code_apart[::2]]
    return "".join(code_apart)


# ---- policies ----------------------------------------------------------------------------------


def policies() -> Pages:
    """A page for each registered policy, from its docstring and its traits, and one that lists them by family."""
    from sim.policies import FAMILIES, names
    from sim.report.listings import policy_record

    records = [policy_record(name) for name in names()]
    pages: Pages = {f"policies/{record['name']}.md": _policy(record) for record in records}
    families = [*FAMILIES, *sorted({record["family"] for record in records} - set(FAMILIES))]
    parts = [
        "# Policies",
        "Every policy that this version knows, by what it does with what does not fit. *Fidelity* says how near it is "
        "to the published system: checked against the authors' `code`, the paper's `equations`, or a "
        "`reconstruction`, where detail was not public.",
    ]
    for family in families:
        members = [record for record in records if record["family"] == family]
        rows = [[f"[`{r['name']}`]({r['name']}.md)", _first(r), ", ".join(_does(r)), r["fidelity"]] for r in members]
        if rows:
            head = ("policy", "what it decides", "does", "fidelity")
            parts += [f"## {FAMILY_TITLES.get(family, family.capitalize())}", table(head, rows)]
    return {"policies/index.md": "\n\n".join(parts), **pages}


def _policy(record: dict[str, Any]) -> str:
    from sim.policies import policy_class
    from sim.report.listings import traits_shown

    name, parameters = record["name"], record["parameters"]
    about = as_markdown(record["doc"], [p["name"] for p in parameters])
    traits = [(trait, _trait(value)) for trait, value in traits_shown(record)]
    traits += [("saves", f"{kind}: {why}") for kind, why in record["saves"].items()]
    rows = [[f"`{p['name']}`", f"`{p['type']}`", _allowed(p), f"`{p['default']}`"] for p in parameters]
    family = FAMILY_TITLES.get(record["family"], record["family"])
    parts = [
        f"# {name}",
        f"*Family: {family.lower()}. Fidelity: {record['fidelity']}."
        + (" Plans slowly: `compare` leaves it out unless it is named.*" if record["slow"] else "*"),
        about,
        "## Parameters",
        table(("parameter", "type", "allowed", "default"), rows) if rows else "None.",
        "## Traits",
        "What the policy declares of itself; `tiersim check` puts it to the test. "
        "[`Policy`](../reference/sim.md#sim.Policy) says what each means.",
        table(("trait", "value"), [[f"`{trait}`", value] for trait, value in traits]),
        "## Try it",
        _fence(
            "sh", f"tiersim compare --profile mt3000_survey --model gpt2 --batch 1 --seq 512 --policies keep_all,{name}"
        ),
    ]
    path = inspect.getsourcefile(policy_class(name))
    if path and Path(path).is_relative_to(ROOT):
        code = Path(path).read_text(encoding="utf-8")
        inside = "\n".join(f"    {line}".rstrip() for line in _fence("python", code).splitlines())
        parts += [
            "## Source { data-search-exclude }",
            f'??? abstract "`{Path(path).relative_to(ROOT).as_posix()}`"\n\n{inside}',
        ]
    return "\n\n".join(parts)


def _first(record: dict[str, Any]) -> str:
    return str(record["doc"]).split("\n", 1)[0]


def _does(record: dict[str, Any]) -> list[str]:
    verbs = ("online", "recomputes", "moves", "rewrites", "optimal")
    return ["optimal in its class" if verb == "optimal" else verb for verb in verbs if record.get(verb)]


def _allowed(parameter: dict[str, Any]) -> str:
    """What a parameter may be, where its type does not say it all."""
    return parameter["expected"] if parameter["choices"] or parameter["bounds"] else ""


def _trait(value: Any) -> str:
    if isinstance(value, (tuple, frozenset)):
        return ", ".join(f"`{item}`" for item in sorted(value))
    return "yes" if value is True else f"`{value}`"


def _fence(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


# ---- machines ----------------------------------------------------------------------------------


def machines() -> Pages:
    """A page for each profile that is shipped, with every figure, its source and its standing."""
    from sim.hardware import fit_error, load_profile, profile_names, profile_table

    pages: Pages = {}
    for name in profile_names():
        platform = load_profile(name)
        errors = {what: fit_error(platform, key) for what, key in (("ops", "op_time"), ("copies", "transfer_time"))}
        said = [
            f"- Times of {what}: " + ("no measurement." if e is None else f"mean error {e:.1%} against measurements.")
            for what, e in errors.items()
        ]
        rows = [[f"`{path}`", value, standing, source] for path, value, source, standing in profile_table(platform)]
        notes = [f"- {as_markdown(note)}" for note in platform.notes]
        parts = [f"# {name}", platform.description, "\n".join([*said, *notes]), "## Figures"]
        parts += [table(("figure", "value", "standing", "source"), rows)]
        pages[f"machines/{name}.md"] = "\n\n".join(parts)
    return pages


# ---- the reference -----------------------------------------------------------------------------


def reference() -> Pages:
    """The public names of the packages, to be filled from their docstrings, and the commands with their options."""
    pages: Pages = {}
    places: dict[tuple[str, str], tuple[str, str]] = {}
    for title, modules in REFERENCE.items():
        page = f"reference/{title.lower().replace(' ', '-')}.md"
        parts = [f"# {title}"]
        for name in modules:
            module = import_module(name)
            parts += ([f"## `{name}`"] if len(modules) > 1 else []) + [as_markdown(module.__doc__ or "")]
            fresh, known = [], []
            for public in _public(module):
                value = getattr(module, public)
                key = (getattr(value, "__module__", name), getattr(value, "__qualname__", public))
                if key in places:
                    known.append(f"[`{public}`]({places[key][0]}#{places[key][1]})")
                else:
                    places[key] = (Path(page).name, f"{name}.{public}")
                    fresh.append(f"::: {name}.{public}\n    options:\n      heading_level: {2 + (len(modules) > 1)}")
            parts += [f"Described elsewhere: {', '.join(known)}."] if known else []
            parts += fresh
        pages[page] = "\n\n".join(parts)
    pages["reference/command-line.md"] = command_line()
    return pages


def _public(module: ModuleType) -> list[str]:
    named = getattr(module, "__all__", None)
    if named is not None:
        return list(named)
    own = vars(module).items()
    return [k for k, v in own if not k.startswith("_") and getattr(v, "__module__", "") == module.__name__]


def command_line() -> str:
    """Each command with what `--help` says of it."""
    from typer.testing import CliRunner

    from sim.cli import app

    def commands() -> Iterator[tuple[str, ...]]:
        for command in app.registered_commands:
            yield (command.name or command.callback.__name__,)  # type: ignore[union-attr]
        for group in app.registered_groups:
            for command in group.typer_instance.registered_commands:  # type: ignore[union-attr]
                yield str(group.name), command.name or command.callback.__name__  # type: ignore[union-attr]

    runner = CliRunner(env={"COLUMNS": "100", "TERMINAL_WIDTH": "100"})
    parts = [
        "# Command line",
        "Exit status: 0 done, 1 infeasible or failed, 2 usage. Mistakes are one line on standard error.",
    ]
    for words in commands():
        said = runner.invoke(app, [*words, "--help"], prog_name="tiersim").output
        parts += [f"## tiersim {' '.join(words)}", _fence("text", said)]
    return "\n\n".join(parts)


# ---- notebooks and files -----------------------------------------------------------------------


def notebooks() -> Pages:
    """The stored notebooks with their pictures."""
    pages: Pages = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, pictures = page_of(path)
        pages[f"notebooks/{path.stem}.md"] = text
        pages |= {f"notebooks/{name}": picture for name, picture in pictures.items()}
    return pages


def source(path: str) -> str:
    """A file of the repository as a page."""
    language = {"py": "python", "toml": "toml", "cff": "yaml"}.get(path.rpartition(".")[2], "text")
    text = (ROOT / path).read_text(encoding="utf-8")
    front = "---\nsearch:\n  exclude: true\nhide: [navigation, toc]\n---"
    return "\n\n".join([front, f"# {Path(path).name}", f"`{path}`", _fence(language, text)])

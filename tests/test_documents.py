"""What the documents say runs: README, docstrings, notebooks, tables and paths."""

from __future__ import annotations

import doctest
import importlib
import inspect
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
READMES = ("README.md", "README.zh.md")
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("hardware_profiles/*.md"))
)
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = re.compile(r"<!-- commands -->\n(.*?)<!-- end of commands -->", re.DOTALL)


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name, language):
    return [code for kind, code in FENCE.findall(COMMANDS.sub("", text_of(name))) if kind == language]


def commands(name):
    return [line for block in blocks(name, "sh") for line in block.splitlines()]


def tool(name):
    return importlib.import_module(f"scripts.{name}")


# ---- README ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", READMES)
def test_two_commands_stand_between_the_marks(name):
    (inside,) = COMMANDS.findall(text_of(name))
    assert inside.splitlines() == [
        "```sh",
        "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/tiersim demo",
        "python3 -m venv .venv && .venv/bin/pip install '.[test]' && .venv/bin/pytest",
        "```",
    ]


def test_python_of_the_readme_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    space = {}
    for number, code in enumerate(blocks("README.md", "python")):
        exec(compile(code, f"README.md, Python block {number}", "exec"), space)
    assert "full_recompute" in capsys.readouterr().out


def test_shell_lines_of_the_readme_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    from sim import cli

    monkeypatch.chdir(tmp_path)
    lines = commands("README.md")
    assert len(lines) >= 3
    for line in lines:
        command, _, target = line.partition(" > ")
        words = shlex.split(command)
        assert words[0] == "tiersim", line
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        assert end.value.code == 0, f"{line}\n{said.out}\n{said.err}"
        assert said.out, line
        if target:
            (tmp_path / target.strip()).write_text(said.out, encoding="utf-8")
    assert (tmp_path / "out" / "summary.json").is_file()


def test_both_readmes_have_the_same_commands():
    assert commands("README.zh.md") == commands("README.md")


def test_both_readmes_have_the_same_python_but_for_its_comments():
    def bare(name):
        return [re.sub(r"  # .*", "", code) for code in blocks(name, "python")]

    assert bare("README.zh.md") == bare("README.md")


def test_both_readmes_link_to_the_same_files():
    links = [set(re.findall(r"\]\(([^)]+)\)", text_of(name))) - set(READMES) for name in READMES]
    assert links[0] == links[1] - {"docs/guide.zh.md"}


def test_both_readmes_have_the_same_headings_and_numbers():
    def bare(name):
        text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"```.*?```", "", text_of(name), flags=re.DOTALL))
        return set(re.findall(r"\d[\d.,]*\d|\d", text)), re.findall(r"^#+ ", text, flags=re.MULTILINE)

    assert bare("README.zh.md") == bare("README.md")


def test_the_readme_is_read_in_a_few_minutes():
    assert len(re.sub(r"```.*?```", "", text_of("README.md"), flags=re.DOTALL).split()) < 650


def test_the_demos_table_is_what_the_demo_finds():
    demo = tool("make_demo")
    rows = demo.rows()
    for block, pages, new in (
        (demo.DEMO, demo.PAGES, demo.table(rows)),
        (demo.VERDICT, demo.VERDICT_PAGES, demo.verdict(rows)),
    ):
        for name in pages:
            text = text_of(name)
            assert demo.replaced(text, new, block) == text, f"{name}: run python scripts/make_demo.py"


def test_the_demos_page_says_why_from_the_logs():
    demo = tool("make_demo")
    rows = demo.rows(demo.ASYNCHRONOUS)
    text = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    assert demo.replaced(text, demo.why_table(rows), demo.WHY) == text, "run python scripts/make_demo.py"
    planned, lru, lru_ahead, delta, delta_ahead = rows
    for row in rows:  # waits and recomputation are all of the difference
        lost = sum(row["stall_ns"].values()) + row["recompute_ns"]
        assert row["makespan_ns"] - planned["makespan_ns"] == lost - sum(planned["stall_ns"].values())
    assert lru["overlap"] == 0
    for waits, ahead in ((lru, lru_ahead), (delta, delta_ahead)):
        assert waits["stall_ns"]["space"] > 0
        assert 2 * (ahead["makespan_ns"] - planned["makespan_ns"]) < waits["makespan_ns"] - planned["makespan_ns"]


# ---- docstrings --------------------------------------------------------------------------------


def modules():
    for package in ("sim", "workloads"):
        found = importlib.import_module(package)
        yield package
        yield from (m.name for m in pkgutil.walk_packages(found.__path__, f"{package}.") if "__main__" not in m.name)


@pytest.mark.parametrize("name", sorted(modules()))
def test_examples_in_docstrings_are_true(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        pytest.skip(f"{name} needs the extra `torch`")
    if ">>>" in inspect.getsource(module):  # few have any, and the search through all objects takes long
        assert doctest.testmod(module).failed == 0


def test_there_are_examples_in_docstrings():
    assert sum(doctest.testmod(importlib.import_module(f"sim.{name}")).attempted for name in ("errors", "units")) > 3


# ---- notebooks ---------------------------------------------------------------------------------


def code_of(path):
    """The lines of a notebook's code."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code").splitlines()


def results(book):
    """What the cells tagged "checked" printed and returned, as text."""
    found = []
    for cell in book.cells:
        if "checked" in cell.metadata.get("tags", ()):
            for output in cell.outputs:
                text = output.get("text") or output.get("data", {}).get("text/plain", "")
                found += [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_finds_what_it_shows(path, tmp_path):
    import nbformat

    if re.search(r"^import torch$", "\n".join(code_of(path)), re.MULTILINE):
        pytest.importorskip("torch", reason=f"{path.name} needs the extra `torch`")
    shown = results(nbformat.read(path, as_version=4))
    assert shown, "no cell is tagged 'checked'"
    found = results(tool("run_notebooks").executed(path, tmp_path))
    assert found == shown, "run python scripts/run_notebooks.py, and read its text again"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_its_outputs_and_nothing_of_its_machine(path):
    import nbformat

    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert path.stat().st_size < 500_000
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(cell.execution_count == number for number, cell in enumerate(code, 1))
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert not [output for cell in code for output in cell.outputs if output.get("name") == "stderr"]
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|usr|work|Users|site-packages)/", text)
    assert tool("run_notebooks").stored(book) == text, "run python scripts/run_notebooks.py"


def test_there_is_a_notebook():
    assert NOTEBOOKS


# ---- paths and links ---------------------------------------------------------------------------

OURS = re.compile(r"(?:sim|workloads|hardware_profiles|tests|docs|notebooks|benchmarks)/[\w./*-]*")
THEIRS = re.compile(r"https://\S+ \S+ @\w+")
"""A file of another repository, at a commit."""


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_that_a_document_names_is_there(name):
    paths = {found.rstrip(".") for found in OURS.findall(THEIRS.sub("", text_of(name)))}
    missing = [path for path in sorted(paths) if not ((ROOT / path).exists() or list(ROOT.glob(path)))]
    assert missing == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_of_a_document_leads_to_a_file(name):
    links = re.findall(r"\]\(([^)#]+)\)", text_of(name))
    here = (ROOT / name).parent
    assert [link for link in links if "://" not in link and not (here / link).exists()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_policy_and_profile_option_of_a_document_exists(name):
    from sim import policy_names, profile_names
    from workloads import model_names

    text = text_of(name)
    known = {"policy": set(policy_names()), "profile": set(profile_names()), "model": set(model_names())}
    known["model"] |= {"gpt2"}  # an alias is as good
    for option, names in known.items():
        for value in re.findall(rf"--{option} ([\w.:/-]+)", text):
            assert value in names or ".py" in value or value.endswith((".toml", ".json")) or value == "NAME", value


def test_no_document_shows_a_path_of_a_machine():
    for name in DOCUMENTS:
        assert not re.search(r"(?<![\w.:])/(home|root|tmp|usr|work|Users)/", text_of(name)), name


# ---- the command line, as it is installed ------------------------------------------------------


def test_python_dash_m_sim_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "sim", "policies"],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    assert "keep_all" in done.stdout
    assert done.stderr == ""

"""The documentation's site: it builds without a warning, each policy has its page, and every link leads somewhere."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import sim
import workloads
from sim.policies import names, policy_class

ROOT = Path(__file__).resolve().parent.parent
GUIDES = [ROOT / "docs" / "guide.md", *sorted((ROOT / "docs" / "how-to").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Page(HTMLParser):
    """Ids of an HTML page, where its links lead, what it loads, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.words: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids |= {given[key] for key in ("id", "name") if given.get(key)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag == "link" and given.get("href") and given.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(given["href"])
        elif given.get("src"):
            self.loads.append(given["src"])

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def dead_links(pages: dict[Path, Page]) -> list[str]:
    """Links within the site to what is not there: "page: link"."""
    found = []
    for path, page in pages.items():
        for link in {*page.links, *page.loads}:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            wanted = unquote(parts.fragment)
            if not target.is_file() or (wanted and target in pages and wanted not in pages[target].ids):
                found.append(f"{path.name}: {link}")
    return sorted(found)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[Path, Page]:
    """All pages of the site as `mkdocs build --strict` makes it."""
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            pytest.skip(f"needs the extra `docs`: there is no {module}")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", str(ROOT / "mkdocs.yml"), "-d", str(folder)],
        capture_output=True, text=True, cwd=ROOT, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not re.search("WARNING|ERROR", done.stdout + done.stderr), done.stderr
    made = sorted(set(folder.rglob("*.html")) - {folder / "404.html"})  # that one is a server's: its links are absolute
    return {path: Page(path.read_text(encoding="utf-8")) for path in made}


def first_page(site: dict[Path, Page]) -> Path:
    return min((path for path in site if path.name == "index.html"), key=lambda path: len(path.parts))


def page_at(site: dict[Path, Page], name: str) -> Page:
    (found,) = [page for path, page in site.items() if path.as_posix().endswith(f"/{name}")]
    return found


def test_every_link_leads_to_a_page_and_a_place_on_it(site):
    assert len(site) > 60
    assert sum(len(page.links) for page in site.values()) > 1000
    assert dead_links(site) == []


def test_a_page_loads_nothing_from_elsewhere(site):
    loaded = {load for page in site.values() for load in page.loads}
    assert [load for load in loaded if urlsplit(load).netloc] == []
    for sheet in first_page(site).parent.rglob("*.css"):
        assert not re.search(r"url\(\W?https?:|@import", sheet.read_text(encoding="utf-8")), sheet.name


@pytest.mark.parametrize(("typed", "expected"), [("belady", "belady"), ("--micro-batches", "micro-batches")])
def test_the_search_finds_pages_of_a_folder(typed, expected, site, browser):
    page = browser.new_page()
    page.goto((first_page(site).parent / "policies" / "chen.html").as_uri())
    page.focus("input.md-search__input")
    ready = page.locator(".md-search-result__meta", has_text="Type to start searching")
    ready.wait_for(state="attached")  # what is typed before the index is there is not searched for
    page.locator("input.md-search__input").press_sequentially(typed)  # it listens to keys
    hit = page.locator(".md-search-result__link").first
    hit.wait_for()
    assert urlsplit(hit.get_attribute("href")).scheme == "file"
    page.locator(".md-search-result__list", has_text=expected).wait_for()  # it searches after each key
    page.close()


SEEN = (
    *("index.html", "policies/chen.html", "reference/sim.html", "mt3000.zh.html"),
    "notebooks/01_which_policy_on_mt3000.html",
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_of_the_site_can_be_read(site, browser, scheme):
    """On a desk and on a phone: contrast, cut text, text on text; `looks.js` says what it looks for."""
    found = {}
    for name in SEEN:
        for width, height in ((1400, 1000), (390, 844)):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.add_init_script(path=ROOT / "tests" / "report" / "looks.js")
            page.goto((first_page(site).parent / name).as_uri())
            page.wait_for_timeout(200)  # until colours have faded in
            found |= {(name, width): faults} if (faults := page.evaluate("looks()")) else {}
            page.close()
    assert found == {}


def test_the_first_key_of_the_site_leads_to_its_text_and_each_stop_shows_itself(site, browser):
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    page.add_init_script(path=ROOT / "tests" / "report" / "looks.js")
    page.goto((first_page(site).parent / "guide.html").as_uri())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.matches('.md-skip')")
    reached = [page.evaluate("focused()")]
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("focused()"))
    page.close()
    assert [stop["what"] for stop in reached if stop and stop["faults"]] == []
    assert len({stop["number"] for stop in reached if stop}) == len(reached)


@pytest.mark.parametrize("name", names())
def test_each_policy_has_a_page_with_its_docstring_and_parameters(site, name):
    page = page_at(site, f"policies/{name}.html")
    found = policy_class(name)
    summary = re.sub(r"`", "", (found.__doc__ or "").strip().splitlines()[0])
    assert " ".join(summary.split()) in page.text
    assert [field.name for field in dataclasses.fields(found) if field.name not in page.text] == []
    assert any(link.endswith(f"{name}.html") for link in page_at(site, "policies/index.html").links)


def test_no_cell_shows_the_signs_that_kept_it_one(site):
    assert "int | None" in page_at(site, "policies/chen.html").text
    assert [path.name for path, page in site.items() if re.search(r"\w \\\| \w|&lt;|&amp;", page.text)] == []


@pytest.mark.parametrize("package", [sim, workloads], ids=lambda package: package.__name__)
def test_each_public_name_stands_in_the_reference(site, package):
    page = page_at(site, f"reference/{package.__name__}.html")
    described = page.ids | {link.partition("#")[2] for link in page.links}
    missing = [
        name
        for name in package.__all__
        if f"{package.__name__}.{name}" not in described and not any(d.endswith(f".{name}") for d in described)
    ]
    assert missing == []


def test_each_notebook_is_a_page_with_its_pictures(site):
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = page_at(site, f"notebooks/{path.stem}.html")
        pictures = path.read_text(encoding="utf-8").count('"image/png"')
        assert sum(load.startswith(path.stem) for load in page.loads) == pictures > 0


def test_each_written_page_is_found_from_the_first(site):
    reached, todo = {first_page(site)}, [first_page(site)]
    while todo:
        here = todo.pop()
        for link in site[here].links:
            parts = urlsplit(link)
            target = (here.parent / unquote(parts.path)).resolve()
            if parts.path and not parts.netloc and target in site and target not in reached:
                reached.add(target)
                todo.append(target)
    assert sorted(path.name for path in set(site) - reached) == []


def test_chinese_pages_say_so_and_follow_one_another(site):
    texts = {path.name: path.read_text(encoding="utf-8") for path in site}
    chinese = {name for name in texts if name.endswith(("zh.html", ".zh.html"))}
    assert len(chinese) >= 3
    for name, html in texts.items():
        assert f'<html lang="{"zh-Hans" if name in chinese else "en"}"' in html, name
    following = re.compile(r'<a href="([^"]+)" class="md-footer__link md-footer__link--next"')
    leads = {name: Path(found[1]).name for name, html in texts.items() if (found := following.search(html))}
    assert sum(name not in chinese and after in chinese for name, after in leads.items()) == 1  # into their part
    assert not [name for name, after in leads.items() if name in chinese and after not in chinese]


def test_the_source_of_a_policy_is_named_as_its_file_is(site):
    assert "sim/policies/offload/zero_offload/__init__.py" in page_at(site, "policies/zero_offload.html").text


def test_a_dead_link_would_be_found(tmp_path):
    first, second = tmp_path / "a.html", tmp_path / "b.html"
    first.write_text("<a href='b.html#there'>x</a><a href='b.html#gone'>x</a><img src='c.png'>")
    second.write_text("<h1 id='there'>y</h1>")
    pages = {path: Page(path.read_text()) for path in (first, second)}
    assert dead_links(pages) == ["a.html: b.html#gone", "a.html: c.png"]


def test_a_docstring_becomes_lists_and_labels_and_its_code_stays_as_it_is():
    pytest.importorskip("griffe", reason="needs the extra `docs`")
    module = importlib.import_module("scripts.site_docstrings")
    text = """Time is bytes * ns; `a * b` is code.

Source: Somebody, "A pa-
    per", 2020.
Departs: not at all.

x, y: sizes in bytes. z: a time. It has no unit: none.
Raises ValueError for x < 0.

    a = b * c

    d = a
"""
    assert module.as_markdown(text, ["x", "y", "z"]).split("\n\n") == [
        r"Time is bytes \* ns; `a * b` is code.",
        '**Source**: Somebody, "A pa-per", 2020.',
        "**Departs**: not at all.",
        "- `x`, `y`: sizes in bytes.\n- `z`: a time. It has no unit: none.",
        "**Raises** ValueError for x &lt; 0.",
        "```python\na = b * c",
        "d = a\n```",
    ]


def test_lists_and_emphasis_of_a_docstring_are_some_on_the_site():
    text = """It says *what* is computed, for *args and a * b.
What it departs from:
- One is *not known* at
  all.
- Two.
Then prose again.

- Three, by itself.
"""
    pytest.importorskip("griffe", reason="needs the extra `docs`")
    assert importlib.import_module("scripts.site_docstrings").as_markdown(text) == (
        r"It says *what* is computed, for \*args and a \* b. What it departs from:"
        "\n\n- One is *not known* at all.\n- Two.\n\nThen prose again.\n\n- Three, by itself."
    )


# ---- the guide and the how-tos ------------------------------------------------------------------


def forget_modules_of(folder):
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(folder):
            del sys.modules[name]


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_what_a_guide_tells_to_type_works(path, tmp_path, monkeypatch, capsys, request):
    """`sh` and `python` blocks run in order, in one empty folder; blocks with a title are files of that name."""
    from sim import cli

    blocks = FENCE.findall(path.read_text(encoding="utf-8"))
    if any("import torch" in code for _, _, code in blocks):
        pytest.importorskip("torch", reason="needs the extra `torch`")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as for a program in that folder
    request.addfinalizer(lambda: forget_modules_of(tmp_path))
    space: dict[str, object] = {}
    for kind, title, code in blocks:
        name = re.search(r'title="([^"]+)"', title)
        if name:
            (tmp_path / name[1]).write_text(code, encoding="utf-8")
        elif kind == "python":
            exec(compile(code, path.name, "exec"), space)
        for line in code.splitlines() if kind == "sh" else ():
            command, _, target = line.partition(" > ")
            monkeypatch.setattr(sys, "argv", shlex.split(command))
            with pytest.raises(SystemExit) as end:
                cli.main()
            said = capsys.readouterr()
            assert end.value.code == 0, f"{line}\n{said.out}\n{said.err}"
            if target:
                (tmp_path / target.strip()).write_text(said.out, encoding="utf-8")

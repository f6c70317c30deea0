"""MkDocs hooks: adds the made pages, puts together the navigation of what there is, and turns links between files
of the repository into links between pages."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import site_pages  # noqa: E402  (found beside this file, as the program is)

from sim.policies import family, names  # noqa: E402

READMES = {"index.md": "README.md", "zh.md": "README.zh.md", "machines/index.md": "hardware_profiles/README.md"}
"""Pages that are a file of the repository elsewhere."""

HOW_TO = (
    "get-advice",
    "apply-a-plan",
    "fine-tune",
    "combine-policies",
    "many-devices",
    "add-a-policy",
    "add-a-profile",
    "add-an-analysis",
    "import-a-trace",
    "capture-a-model",
    "calibrate-and-validate",
)
READING = ("explain-a-run", "read-a-timeline", "report-page")
CHINESE = "zh-Hans"
LINK = re.compile(r"(?<=\]\()([^)#\s]+)((?:#[^)\s]*)?)(?=\))")


def page_for(path: str) -> str | None:
    """The page that stands for a file of the repository; None where there is no such file."""
    for page, origin in READMES.items():
        if path == origin:
            return page
    if not (ROOT / path).is_file():
        return None
    parts = path.split("/")
    if parts[0] == "docs":
        return path.removeprefix("docs/")
    if path.startswith("sim/policies/") and (name := Path(path.removesuffix("/__init__.py")).stem) in names():
        return f"policies/{name}.md"
    if parts[0] == "notebooks":
        return f"notebooks/{Path(path).stem}.md"
    if parts[0] == "hardware_profiles" and path.endswith(".toml"):
        return f"machines/{Path(path).stem}.md"
    return f"source/{path}.md"


def origin_of(page: str) -> str:
    """The file of the repository that a page was written as."""
    if page.startswith("notebooks/"):
        return page.removesuffix(".md") + ".ipynb"
    return READMES.get(page, f"docs/{page}")


def targets(text: str, page: str) -> dict[str, str]:
    """Links of a page's text to files of the repository: as written -> page."""
    here = posixpath.dirname(origin_of(page))
    found = {}
    for match in LINK.finditer(text):
        if "://" not in match[1]:
            target = page_for(posixpath.normpath(posixpath.join(here, match[1])))
            if target is not None:
                found[match[1]] = target
    return found


def relinked(text: str, page: str) -> str:
    """The text with such links leading to pages."""
    known = targets(text, page)

    def replaced(match: re.Match[str]) -> str:
        target = known.get(match[1])
        return (posixpath.relpath(target, posixpath.dirname(page) or ".") if target else match[1]) + match[2]

    return LINK.sub(replaced, text)


# ---- hooks -------------------------------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is made, the files that pages link to, and the navigation."""
    made: dict[str, str | bytes] = {}
    for page, origin in READMES.items():
        alone = "---\nhide: [navigation]\n---\n\n" if page == "index.md" else ""
        made[page] = alone + (ROOT / origin).read_text(encoding="utf-8")
    for make in (site_pages.policies, site_pages.machines, site_pages.reference, site_pages.notebooks):
        made |= make()
    written = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for page, text in {**written, **made}.items():
        if isinstance(text, str) and not page.startswith(("policies/", "reference/")):
            for target in targets(text, page).values():
                if target.startswith("source/"):
                    path = target.removeprefix("source/").removesuffix(".md")
                    made.setdefault(target, site_pages.source(path))
    for page, content in made.items():
        aside = InclusionLevel.NOT_IN_NAV if page.startswith("source/") else InclusionLevel.INCLUDED
        files.append(File.generated(config, page, content=content, inclusion=aside))
    config.nav = _nav(written, made)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to pages instead of files."""
    here = page.file.src_uri
    return markdown if here.startswith(("policies/", "reference/", "source/")) else relinked(markdown, here)


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Say which language a page is in, for screen readers, hyphens and fonts."""
    return output.replace('<html lang="en"', f'<html lang="{CHINESE}"', 1) if is_chinese(page.file.src_uri) else output


def is_chinese(page: str) -> bool:
    """Whether a page is a Chinese one."""
    return page == "zh.md" or page.endswith(".zh.md")


def _nav(written: dict[str, str], made: dict[str, str | bytes]) -> list[Any]:
    """The pages there are, in order; what is written and has no place of its own comes under "About"."""

    def there(*pages: str) -> list[str]:
        return [page for page in pages if page in written or page in made]

    def under(folder: str) -> list[str]:
        first = f"{folder}/index.md"
        return [
            *there(first),
            *sorted(p for p in made if p.startswith(f"{folder}/") and p.endswith(".md") and p != first),
        ]

    how_to = there(*(f"how-to/{name}.md" for name in HOW_TO), "sweeps.md", *(f"how-to/{name}.md" for name in READING))
    how_to += sorted(page for page in written if page.startswith("how-to/") and page not in how_to)
    placed = {"guide.md", *how_to}
    pages = ("model", "coverage", "validation", "recompute", "hybrid", "mt3000_layered", "demo")
    about = there(*(f"{name}.md" for name in pages))
    about += sorted(page for page in written if page not in placed and page not in about and not is_chinese(page))
    chinese = ["zh.md", *sorted(page for page in written if is_chinese(page))]  # apart: "next" keeps to one language
    by_family: dict[str, list[str]] = {}
    for name in names():
        title = site_pages.FAMILY_TITLES.get(family(name), family(name).capitalize())
        by_family.setdefault(title, []).append(f"policies/{name}.md")
    reference = [f"reference/{title.lower().replace(' ', '-')}.md" for title in site_pages.REFERENCE]
    return [
        {"Home": "index.md"},  # on its own, so that the logo leads there
        {"Guide": ["guide.md", {"How to": how_to}]},
        {"Policies": ["policies/index.md", *({title: pages} for title, pages in by_family.items())]},
        {"Machines": under("machines")},
        {"Notebooks": under("notebooks")},
        {"Reference": [*reference, "reference/command-line.md"]},
        {"About": about},
        {"中文": chinese},
    ]

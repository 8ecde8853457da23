"""Hooks of mkdocs, next to mkdocs.yml: generated pages, files outside of docs/, mermaid's script.

Documents link to files of the repository (`../recipes/quickstart.yaml`), so links work where the
code is read. In the site each of those files is a page, and the README is the first one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from generated import kinds, pages, stage_table  # next to this file: mkdocs finds it there
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

from pipeline.chain.registry import Registry

SITE = Path(__file__).parent
DOCS = SITE.parent
ROOT = DOCS.parent

MERMAID = "assets/mermaid.min.js"
MERMAID_SHA256 = "74d7c46dabca328c2294733910a8aa1ed0c37451776e8d5295da38a2b758fb9b"
"""Digest of mermaid 11.16.0 as its authors publish it; the package mermaidx carries that file."""
LINK = re.compile(r"(\]\(|\bsrc=\")([^()#\s\":]+)(?=[#)\"])")
"""A link or a picture without a scheme: how it begins, and its path."""
NOTES = re.compile(r"^(```\w+) (?:file=(\S+)|.*)$", re.M)
"""Words after a fence's language: for tests, and the name of the file that is shown."""
AT_THE_TOP = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
}
"""Documents at the top of the repository, and their pages."""
MADE = ("reference/", "source/")
"""Folders of pages that are no documents."""
MOST_SHOWN = 20_000
"""Bytes of the largest file that the page of a folder shows."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json"}


def on_config(config: Any) -> Any:
    """Put the generated pages and those for maintainers into the navigation."""
    stages = [{kind: f"reference/{kind}.md"} for kind in kinds(Registry.installed())]
    first = ["design", "read-the-code"]
    own = sorted(
        (DOCS / "dev").glob("*.md"),
        key=lambda file: ([*first, file.stem].index(file.stem), file.stem),
    )
    added = {
        "Reference": ["reference/recipe.md", {"Stages": stages}, "reference/commands.md"],
        "Results": [{"Changes": "CHANGELOG.md"}],
        "Development": [{"Contributing": "CONTRIBUTING.md"}, *(f"dev/{file.name}" for file in own)],
    }
    for part in config.nav:
        for title in added.keys() & part.keys():
            part[title].extend(added[title])
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add generated pages, pages of linked files, the style sheet and scripts."""
    made = pages() | {page: (ROOT / name).read_text("utf-8") for name, page in AT_THE_TOP.items()}
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    for target in sorted(linked_files()):
        file = File.generated(config, source_page(target), content=shown(target))
        file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    own = {f"assets/{name}": SITE / name for name in ("style.css", "iframe-worker.js")}
    for path, source in (own | {MERMAID: mermaid()}).items():
        files.append(File.generated(config, path, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to pages of the site, title shown files, and list the stages."""
    uri = page.file.src_uri
    if uri.startswith(MADE):
        return markdown
    if uri == "recipes.md":
        markdown = markdown.replace("<!-- stages -->", stage_table(Registry.installed()))
    names = {page: name for name, page in AT_THE_TOP.items()}
    document = names.get(uri, f"docs/{uri}")
    return NOTES.sub(_titled, LINK.sub(_within_site(document, uri), markdown))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load mermaid's script where there is a diagram; the theme would fetch it from the network."""
    if 'class="mermaid"' not in output:
        return output
    up = "../" * page.url.count("/")
    return output.replace("</head>", f'<script src="{up}{MERMAID}"></script></head>', 1)


def linked_files() -> set[str]:
    """Paths, from the top of the repository, that documents link to and that are none."""
    documents = [*DOCS.glob("*.md"), *DOCS.glob("dev/*.md"), *(ROOT / name for name in AT_THE_TOP)]
    found = {
        _in_repository(file.relative_to(ROOT).as_posix(), match[2])
        for file in documents
        for match in LINK.finditer(file.read_text("utf-8"))
    }
    return {path for path in found if not path.startswith("docs/")} - AT_THE_TOP.keys()


def source_page(target: str) -> str:
    """Page of a file, or of a folder."""
    return f"source/{target}.md"


def shown(target: str) -> str:
    """A file, or a folder's files of known kinds, as Markdown. Large ones of a folder are named."""
    path = ROOT / target
    parts = ["---\nsearch: {exclude: true}\n---", f"# {target}"]
    if path.is_file():
        return "\n\n".join([*parts, _fenced(path)])
    for file in sorted(path.rglob("*")):
        if file.suffix in LANGUAGES:
            size = file.stat().st_size
            text = _fenced(file) if size <= MOST_SHOWN else f"{size:,} bytes: see the repository."
            parts += [f"## {file.relative_to(path)}", text]
    return "\n\n".join(parts)


def _fenced(file: Path) -> str:
    language = LANGUAGES.get(file.suffix, "text")
    return f"`````{language}\n{file.read_text('utf-8').rstrip()}\n`````"


def mermaid() -> Path:
    """Mermaid's script, unchanged, from an installed package."""
    spec = importlib.util.find_spec("mermaidx")
    if spec is None or spec.origin is None:
        raise PluginError("mermaidx is missing: pip install -c constraints.txt -e '.[docs]'")
    file = Path(spec.origin).parent / "assets" / "mermaid.js"
    if hashlib.sha256(file.read_bytes()).hexdigest() != MERMAID_SHA256:
        raise PluginError(f"{file} is not mermaid 11.16.0: install the mermaidx of constraints.txt")
    return file


def _in_repository(document: str, target: str) -> str:
    """Path of a link's target from the top of the repository."""
    return normpath(f"{dirname(document)}/{target}").lstrip("/")


def _within_site(document: str, page: str) -> Callable[[re.Match[str]], str]:
    def lead(match: re.Match[str]) -> str:
        path = _in_repository(document, match[2])
        inside = path.removeprefix("docs/") if path.startswith("docs/") else None
        target = inside or AT_THE_TOP.get(path) or source_page(path)
        return f"{match[1]}{relpath(target, dirname(page) or '.')}"

    return lead


def _titled(match: re.Match[str]) -> str:
    return f'{match[1]} title="{match[2]}"' if match[2] else match[1]

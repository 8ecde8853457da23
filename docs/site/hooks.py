"""Hooks of mkdocs, beside mkdocs.yml: generated pages, files outside of docs/, mermaid's script.

Pages link to files of the repository (`../recipes/quickstart.yaml`) so that the links work where
the code is read. In the site, each of those files is a page of its own.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from pathlib import Path, PurePosixPath
from typing import Any

from generated import kinds, pages, stage_table  # beside this file: mkdocs finds it there
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

from pipeline.chain.registry import Registry

SITE = Path(__file__).parent
DOCS = SITE.parent
ROOT = DOCS.parent

MERMAID = "assets/mermaid.min.js"
MERMAID_SHA256 = "74d7c46dabca328c2294733910a8aa1ed0c37451776e8d5295da38a2b758fb9b"
"""Digest of mermaid 11.16.0 as its authors publish it; the package mermaidx carries that file."""
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+?)/?(#[^)]*)?\)")
NOTES = re.compile(r"^(```\w+) (?:file=(\S+)|.*)$", re.M)
"""Words behind a fence's language: for tests, and the name of the file that is shown."""
INSTEAD = {"README.md": "index.md"}
PROJECT = {"CHANGELOG.md": "Changes", "CONTRIBUTING.md": "Contributing"}
"""Documents at the top of the repository that are pages too."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json"}


def on_config(config: Any) -> Any:
    """Put the generated pages into the navigation."""
    stages = [{kind: f"reference/{kind}.md"} for kind in kinds(Registry.installed())]
    for part in config.nav:
        part.get("Reference", []).extend(
            ["reference/recipe.md", {"Stages": stages}, "reference/commands.md"]
        )
        part.get("Evidence", []).extend({title: name} for name, title in PROJECT.items())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add generated pages, pages of linked files, the style sheet and scripts."""
    made = pages()
    made |= {name: (ROOT / name).read_text("utf-8").replace("](docs/", "](") for name in PROJECT}
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
    """Lead links out of docs/ to pages of the site, title shown files, and list the stages."""
    if page.file.src_uri == "reference.md":
        markdown = markdown.replace("<!-- stages -->", stage_table(Registry.installed()))
    if "/" in page.file.src_uri:
        return markdown
    return NOTES.sub(_titled, OUTSIDE.sub(_inside, markdown))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load mermaid's script where there is a diagram; the theme would fetch it from the network."""
    if 'class="mermaid"' not in output:
        return output
    up = "../" * page.url.count("/")
    return output.replace("</head>", f'<script src="{up}{MERMAID}"></script></head>', 1)


def linked_files() -> set[str]:
    """Paths, from the top of the repository, that pages link to outside of docs/."""
    texts = (path.read_text("utf-8") for path in DOCS.glob("*.md"))
    found = {match[1] for text in texts for match in OUTSIDE.finditer(text)}
    return found - INSTEAD.keys() - PROJECT.keys()


def source_page(target: str) -> str:
    """Page of a file, or of a folder."""
    return f"source/{target}.md"


def shown(target: str) -> str:
    """A file, or a folder's files of known kinds, as Markdown."""
    path = ROOT / target
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    parts = ["---\nsearch: {exclude: true}\n---", f"# {target}"]
    for file in files:
        if file.suffix in LANGUAGES:
            heading = [f"## {file.relative_to(path)}"] if path.is_dir() else []
            text = file.read_text("utf-8").rstrip()
            parts += [*heading, f"`````{LANGUAGES[file.suffix]}\n{text}\n`````"]
    return "\n\n".join(parts)


def mermaid() -> Path:
    """Mermaid's script, unchanged, from an installed package."""
    spec = importlib.util.find_spec("mermaidx")
    if spec is None or spec.origin is None:
        raise PluginError("mermaidx is missing: pip install -c constraints.txt -e '.[docs]'")
    file = Path(spec.origin).parent / "assets" / "mermaid.js"
    if hashlib.sha256(file.read_bytes()).hexdigest() != MERMAID_SHA256:
        raise PluginError(f"{file} is not mermaid 11.16.0: install the mermaidx of constraints.txt")
    return file


def _inside(match: re.Match[str]) -> str:
    target, part = match[1], match[2] or ""
    page = target if target in PROJECT else INSTEAD.get(target) or source_page(target)
    return f"]({PurePosixPath(page)}{part})"


def _titled(match: re.Match[str]) -> str:
    return f'{match[1]} title="{match[2]}"' if match[2] else match[1]

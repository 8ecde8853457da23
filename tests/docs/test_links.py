"""Links between documents work where the code is read, without the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import DOCUMENTS, FENCE, name


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as code hosts make them."""
    text = FENCE.sub("", document.read_text("utf-8"))
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.M):
        plain = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(plain.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_of_a_document_lead_somewhere(document: Path) -> None:
    broken = []
    for target, part in re.findall(
        r"\]\(([^)#\s]*)(#[^)\s]*)?\)", FENCE.sub("", document.read_text())
    ):
        if "://" in target:
            continue
        file = document.parent / target if target else document
        missing = part and file.suffix == ".md" and part[1:] not in anchors(file)
        if not file.exists() or missing:
            broken.append(f"{target}{part}")
    assert broken == []

"""The model card: what a person who finds the folder wants to know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_card(folder: Path, title: str, facts: Mapping[str, str]) -> None:
    """Write README.md with one line per fact."""
    lines = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    text = f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {title}

{lines}

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder", dtype="auto")
```
"""
    (folder / "README.md").write_text(text, encoding="utf-8")

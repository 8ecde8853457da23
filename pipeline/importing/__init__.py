"""`pipe import`: other tools' configuration files, translated into a recipe.

The framework reads the files and shows the outcome of every key. Translators, plugins under the
entry-point group `pipe.imports`, know the meaning of the keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils.lazy import lazily

if TYPE_CHECKING:
    from pipeline.importing.files import read_config
    from pipeline.importing.translator import (
        ConfigFile,
        KeyOutcome,
        OtherTool,
        Request,
        Translation,
        Translator,
    )
    from pipeline.recipe.nodes import KeyPath
else:
    __getattr__ = lazily(__name__, __file__)

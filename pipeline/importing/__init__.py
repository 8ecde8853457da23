"""`pipe import`: other tools' configuration files, translated into a recipe by translators, plugins
under the entry-point group `pipe.imports`, which know the meaning of the keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils.packages import lazily

if TYPE_CHECKING:
    from pipeline.importing.translator import ConfigFile as ConfigFile
    from pipeline.importing.translator import KeyOutcome as KeyOutcome
    from pipeline.importing.translator import OtherTool as OtherTool
    from pipeline.importing.translator import Request as Request
    from pipeline.importing.translator import Translation as Translation
    from pipeline.importing.translator import Translator as Translator
    from pipeline.importing.translator import read_config as read_config
    from pipeline.recipe.nodes import KeyPath as KeyPath
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

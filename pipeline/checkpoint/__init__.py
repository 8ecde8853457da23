"""The canonical checkpoint: one layout whatever the strategy and the world size.

    step-00000020/
      manifest.json             contents, places, checksums
      rank-00000.safetensors    the parts of tensors that this rank wrote
      rank-00000.sums           their block checksums

A logical tensor has a key `KIND/NAME` (`weight/model.norm.weight`, `exp_avg/...`, `random/...`) and
is stored as pieces: ranges of its row-major flattening, or columns of its rows. Pieces of a tensor
are disjoint and cover it, whoever wrote them; any range can be read and verified by itself.

Who does what (`A -> B`: A uses B):

    open      manager -> write_plan (who writes) -> division (tiles, pieces)
              -> file_layout (where in the files and in the snapshot buffer)
    save      manager -> snapshot (copies) -> writer (a process) -> store
    restore   manager -> restore -> reader -> store
    convert   formats (a state to read, a checkpoint as one stream) -> writer -> store

`manifest` says what is on disk, `location` where a run's checkpoints are and which of them stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils.packages import lazily

if TYPE_CHECKING:
    from pipeline.checkpoint.division import Tile as Tile
    from pipeline.checkpoint.file_layout import CHUNK as CHUNK
    from pipeline.checkpoint.file_layout import FULL as FULL
    from pipeline.checkpoint.file_layout import PASSAGE as PASSAGE
    from pipeline.checkpoint.file_layout import SHARDED as SHARDED
    from pipeline.checkpoint.file_layout import Entry as Entry
    from pipeline.checkpoint.file_layout import FileLayout as FileLayout
    from pipeline.checkpoint.file_layout import Placed as Placed
    from pipeline.checkpoint.file_layout import header as header
    from pipeline.checkpoint.file_layout import table as table
    from pipeline.checkpoint.formats import Formats as Formats
    from pipeline.checkpoint.formats import Reading as Reading
    from pipeline.checkpoint.formats import StateFormat as StateFormat
    from pipeline.checkpoint.formats import StateSource as StateSource
    from pipeline.checkpoint.formats import appearing as appearing
    from pipeline.checkpoint.formats import step_target as step_target
    from pipeline.checkpoint.formats import write_checkpoint as write_checkpoint
    from pipeline.checkpoint.location import Retention as Retention
    from pipeline.checkpoint.location import address as address
    from pipeline.checkpoint.location import expected_count as expected_count
    from pipeline.checkpoint.manager import CheckpointManager as CheckpointManager
    from pipeline.checkpoint.manifest import TensorEntry as TensorEntry
    from pipeline.checkpoint.reader import CheckpointReader as CheckpointReader
    from pipeline.checkpoint.reader import open_state as open_state
    from pipeline.checkpoint.store import LocalStore as LocalStore
    from pipeline.checkpoint.write_plan import CODES as CODES
    from pipeline.checkpoint.write_plan import DTYPES as DTYPES
    from pipeline.checkpoint.write_plan import as_bytes as as_bytes
    from pipeline.checkpoint.write_plan import random_key as random_key
    from pipeline.checkpoint.write_plan import start_random_streams as start_random_streams
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

"""The canonical checkpoint: one layout whatever the strategy and the world size.

    step-00000020/
      manifest.json             contents, places, checksums
      rank-00000.safetensors    the parts of tensors that this rank wrote
      rank-00000.sums           their block checksums

A logical tensor has a key `KIND/NAME` (`weight/model.norm.weight`, `exp_avg/...`, `random/...`) and
is stored as pieces: ranges of its row-major flattening, or columns of its rows. Pieces of a tensor
are disjoint and cover it, whoever wrote them; any range of it can be read and verified alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils.lazy import lazily

if TYPE_CHECKING:
    from pipeline.checkpoint.block_sums import CHUNK
    from pipeline.checkpoint.file_layout import FULL, SHARDED, FileLayout
    from pipeline.checkpoint.formats import Formats, Reading, StateFormat, StateSource, open_state
    from pipeline.checkpoint.local_store import LocalStore
    from pipeline.checkpoint.location import address
    from pipeline.checkpoint.manager import CheckpointManager
    from pipeline.checkpoint.manifest import TensorEntry
    from pipeline.checkpoint.offline_writer import appearing, step_target, write_checkpoint
    from pipeline.checkpoint.reader import CheckpointReader
    from pipeline.checkpoint.retention import Retention, expected_count
    from pipeline.checkpoint.rng_state import start_random_streams
    from pipeline.checkpoint.safetensors_format import Entry, Placed, header, table
    from pipeline.checkpoint.staging import PASSAGE
    from pipeline.checkpoint.tiles import Tile
    from pipeline.checkpoint.write_plan import CODES, DTYPES, as_bytes, random_key
else:
    __getattr__ = lazily(__name__, __file__)

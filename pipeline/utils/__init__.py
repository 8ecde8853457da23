"""Files, text, processes and parts of tensors, with nothing about training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils.lazy import lazily

if TYPE_CHECKING:
    from pipeline.utils.activities import BYTES, activity
    from pipeline.utils.addresses import address_problems, open_address
    from pipeline.utils.dtensors import local_part, own_chunk
    from pipeline.utils.fake_tensors import has_values, with_values
    from pipeline.utils.files import (
        cache_folder,
        opened,
        page_aligned,
        read_at,
        replace_text,
        sync,
        sync_tree,
        wait_for_lock,
        write_at,
    )
    from pipeline.utils.foreign import open_regular, parse_json, read_whole, require_regular
    from pipeline.utils.host_copy import HostCopy
    from pipeline.utils.hub import COMMIT, HubName, commit_of, pins_asked
    from pipeline.utils.jsonl import append_line, read_lines
    from pipeline.utils.lazy import lazily
    from pipeline.utils.packages import optional, unheard
    from pipeline.utils.process_tree import die_with, ended_with_this
    from pipeline.utils.terminal import hidden_in, shown
    from pipeline.utils.text import (
        align,
        closest,
        counted,
        did_you_mean,
        duration,
        human,
        in_short,
        near_path,
        plural,
        shown_path,
    )
    from pipeline.utils.trust import require_code_trust, require_trust
else:
    __getattr__ = lazily(__name__, __file__)

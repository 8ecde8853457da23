"""Files, text, processes and parts of tensors, with nothing about training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.utils.packages import lazily as lazily

if TYPE_CHECKING:
    from pipeline.utils.activities import BYTES as BYTES
    from pipeline.utils.activities import activity as activity
    from pipeline.utils.files import cache_folder as cache_folder
    from pipeline.utils.files import expanded as expanded
    from pipeline.utils.files import opened as opened
    from pipeline.utils.files import page_aligned as page_aligned
    from pipeline.utils.files import read_at as read_at
    from pipeline.utils.files import replace_text as replace_text
    from pipeline.utils.files import sync as sync
    from pipeline.utils.files import sync_tree as sync_tree
    from pipeline.utils.files import wait_for_lock as wait_for_lock
    from pipeline.utils.files import write_at as write_at
    from pipeline.utils.foreign import append_line as append_line
    from pipeline.utils.foreign import open_regular as open_regular
    from pipeline.utils.foreign import parse_json as parse_json
    from pipeline.utils.foreign import read_lines as read_lines
    from pipeline.utils.foreign import read_whole as read_whole
    from pipeline.utils.foreign import require_code_trust as require_code_trust
    from pipeline.utils.foreign import require_regular as require_regular
    from pipeline.utils.foreign import require_trust as require_trust
    from pipeline.utils.hub import COMMIT as COMMIT
    from pipeline.utils.hub import HubName as HubName
    from pipeline.utils.hub import address_problems as address_problems
    from pipeline.utils.hub import commit_of as commit_of
    from pipeline.utils.hub import open_address as open_address
    from pipeline.utils.hub import path_problems as path_problems
    from pipeline.utils.hub import pins_asked as pins_asked
    from pipeline.utils.packages import lazily as lazily
    from pipeline.utils.packages import optional as optional
    from pipeline.utils.packages import unheard as unheard
    from pipeline.utils.processes import die_with as die_with
    from pipeline.utils.processes import ended_with_this as ended_with_this
    from pipeline.utils.tensors import HostCopy as HostCopy
    from pipeline.utils.tensors import has_values as has_values
    from pipeline.utils.tensors import local_part as local_part
    from pipeline.utils.tensors import own_chunk as own_chunk
    from pipeline.utils.tensors import with_values as with_values
    from pipeline.utils.terminal import hidden_in as hidden_in
    from pipeline.utils.terminal import shown as shown
    from pipeline.utils.text import align as align
    from pipeline.utils.text import closest as closest
    from pipeline.utils.text import counted as counted
    from pipeline.utils.text import did_you_mean as did_you_mean
    from pipeline.utils.text import duration as duration
    from pipeline.utils.text import human as human
    from pipeline.utils.text import in_short as in_short
    from pipeline.utils.text import near_path as near_path
    from pipeline.utils.text import plural as plural
    from pipeline.utils.text import shown_path as shown_path
else:
    __getattr__, __dir__ = lazily(__name__, __file__)

"""The date that chat templates are told: with the real one a row would change every day."""

from __future__ import annotations

import datetime

_ASKS = "strftime_now"
_DIRECTIVES = "aAbBcCdDeFgGhHIjmMnpRStTuUVwWxXyYzZ"
_BARE = "deHIjmMSUWy"
"""Those that may have no zeros before them, written `%-d`."""


def with_today(template: str, today: str) -> str:
    """A chat template whose `strftime_now` tells of midnight on `today` (YYYY-MM-DD), by a macro of
    that name: functions cannot be handed to a template, and a macro goes before transformers' own.
    """
    if _ASKS not in template:
        return template
    now = datetime.datetime.fromisoformat(today)
    directives = [f"%{letter}" for letter in _DIRECTIVES] + [f"%-{letter}" for letter in _BARE]
    filled = "".join(f'|replace("{each}", "{now.strftime(each)}")' for each in directives)
    # The template stays at the beginning of a line, where its first white space means the same.
    return (
        '{% macro strftime_now(format) %}{% for part in format.split("%%") %}'
        '{{ "" if loop.first else "%" }}{{ part' + filled + " }}{% endfor %}{% endmacro %}\n"
    ) + template


def is_date(text: str) -> bool:
    """Whether it is a day as YYYY-MM-DD."""
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False

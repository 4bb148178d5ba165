"""What a node's log says of peers it will not have.

Whoever can reach the node can be refused as often as it likes, so only a few lines a second are written; the next one says
how many were not. What a peer wrote is escaped. No secret is in a refusal (see `dpurt.errors.SpaceMismatch`), nor in these.
"""

from __future__ import annotations

import structlog
import trio

log = structlog.get_logger()
LINES_PER_S = 5


class RefusalLog:
    """Warnings, at most `LINES_PER_S`."""

    def __init__(self) -> None:
        self._began = float("-inf")
        self._lines = 0
        self._unsaid = 0

    def warn(self, event: str, **fields: str) -> None:
        """One refusal; dropped when there were too many in this second."""
        now = trio.current_time()
        if now >= self._began + 1.0:
            self._began, self._lines = now, 0
        if self._lines == LINES_PER_S:
            self._unsaid += 1
            return
        self._lines += 1
        log.warning(event, **{name: _escaped(text) for name, text in fields.items()}, not_logged=self._unsaid)
        self._unsaid = 0


def _escaped(text: str) -> str:
    return text.encode("unicode_escape").decode()

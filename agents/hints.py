"""Hosts' hints in the predictors' terms: positions in a prompt become blocks, milliseconds from now a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpurt.core.attention import MASS_OF
from dpurt.core.events import DecodeStep, Event, Paused, Ranked, Resumed
from dpurt.wire import messages as m

from .hosts import Refusal
from .sessions import NO_HANDLE, Scope

__all__ = ["check_decode", "event_of"]


def event_of(scope: Scope, hint: m.Hint, now: float) -> Event:
    """What a ``pause``, ``resume`` or ``decode`` hint says."""
    if hint.kind == "pause":
        expected = None if hint.expected_ms is None else hint.expected_ms / 1000
        return Paused(scope.sequence, expected, hint.reason)
    if hint.kind == "resume":
        return Resumed(scope.sequence)
    group = hint.group if hint.ranked_group is None else hint.ranked_group
    need_by = now + hint.need_ms / 1000
    ranked = (Ranked(group, _refs_at(scope, hint.ranked), need_by),) if hint.ranked else ()
    touched, masses = _refs_at(scope, hint.touched), None
    if hint.masses and len(touched) == len(hint.touched):
        masses = tuple(MASS_OF[np.frombuffer(hint.masses, np.uint8)].tolist())
    return DecodeStep(scope.sequence, hint.step, hint.group, touched, ranked, masses)


def check_decode(scope: Scope, hint: m.Hint) -> None:
    """Refusal for a ``decode`` hint that cannot be of this space, or contradicts itself."""
    num_parts = scope.state.layout.num_parts
    for group in (hint.group, hint.ranked_group or 0):
        if group >= num_parts:
            raise Refusal("malformed", f"group {group} of a block with {num_parts}")
    if hint.masses and len(hint.masses) != len(hint.touched):
        raise Refusal("malformed", f"{len(hint.masses)} masses for {len(hint.touched)} touched blocks")
    if hint.shard != scope.shard:
        raise Refusal("malformed", f"shard {hint.shard} of a request that was looked up for {scope.shard}")


def _refs_at(scope: Scope, positions: Sequence[int]) -> tuple[int, ...]:
    known = len(scope.handles)
    handles = scope.handles[[p for p in positions if p < known]] if positions else scope.handles[:0]
    return tuple(scope.state.refs(handles[handles != NO_HANDLE].tolist(), scope.shard))

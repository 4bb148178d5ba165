"""Marks keep salts and adapters apart, and leave plain prompts plain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpurt.engines.vllm.marks import VOCABULARY_BITS, mark_of, marked

FIELDS = st.lists(
    st.tuples(st.sampled_from(["cache_salt", "lora_name", "lora_version"]), st.binary(max_size=12))
)
IDS = st.lists(st.integers(0, (1 << VOCABULARY_BITS) - 1), min_size=40, max_size=70)


def ids_of(raw: bytes | None) -> list[int]:
    assert raw is not None
    return [int(x) for x in np.frombuffer(raw, "<i4")]


def test_a_prompt_without_salt_or_adapter_keeps_its_tokens() -> None:
    assert mark_of([], 16) is None
    assert ids_of(marked([5, 7, 9], None)) == [5, 7, 9]


@given(FIELDS, FIELDS, IDS)
def test_different_fields_give_different_first_blocks(
    one: list[tuple[str, bytes]], other: list[tuple[str, bytes]], ids: list[int]
) -> None:
    first, second = (marked(ids, mark_of(fields, 16)) for fields in (one, other))
    assert first is not None
    assert second is not None
    assert (first[:64] == second[:64]) == (one == other)
    assert first[64:] == second[64:]


@given(FIELDS.filter(bool), IDS, IDS)
def test_no_tokens_of_one_tenant_look_like_those_of_another(
    fields: list[tuple[str, bytes]], ids: list[int], others: list[int]
) -> None:
    mine, theirs = marked(ids, mark_of(fields, 16)), marked(others, None)
    assert mine is not None
    assert theirs is not None
    assert mine[:64] != theirs[:64]


def test_a_token_outside_the_vocabulary_is_not_guessed_at() -> None:
    assert marked([1, 1 << VOCABULARY_BITS], None) is None
    assert marked([-1], None) is None


def test_a_mark_is_frozen() -> None:
    mark = mark_of([("cache_salt", b"tenant-a")], 8)
    assert mark is not None
    assert (mark >> VOCABULARY_BITS).tolist() == FROZEN


def test_a_block_too_small_for_a_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="no room for a mark"):
        mark_of([("cache_salt", b"x")], 4)


FROZEN = [1421, 947, 1137, 215, 1373, 1882, 341, 862]

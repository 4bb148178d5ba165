"""The record codec: what was packed is what is read, and any changed byte is noticed."""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpurt.core.identity import ROOT_KEY, Geometry, LayerGroup, PartRun, Space
from dpurt.core.record import (
    ALIGN,
    RecordError,
    RecordHeader,
    RecordLayout,
    bad_parts,
    pack_header,
    part_crcs,
    stamp,
    unpack_header,
)

KEY = b"k" * 16


def make_space(*part_bytes: int, block_tokens: int = 16, tenant: str = "t") -> Space:
    groups = tuple(
        LayerGroup(name=f"g{i}", num_layers=1, num_kv_heads=1, head_size=1, part_bytes=length)
        for i, length in enumerate(part_bytes)
    )
    geometry = Geometry(block_tokens=block_tokens, groups=groups)
    return Space(model="m", revision="r", kv_dtype="bf16", geometry=geometry, tenant=tenant)


def make_image(
    layout: RecordLayout, fill: bytes = b"payload", tokens: bytes = b"", **fields: float
) -> memoryview:
    image = memoryview(bytearray(layout.record_bytes))
    payload = layout.payload(image)
    payload[:] = (fill * (len(payload) // len(fill) + 1))[: len(payload)]
    header = RecordHeader(
        key=KEY,
        parent=ROOT_KEY,
        fingerprint=layout.fingerprint,
        shard=int(fields.get("shard", 3)),
        position=7,
        part_crcs=part_crcs(layout, payload),
        stored_at=fields.get("stored_at", 1e9),
        expires_at=fields.get("expires_at", 0.0),
        tokens=tokens,
    )
    pack_header(image, layout, header)
    stamp(image, layout, header.store, header.sequence)
    return image


SMALL = RecordLayout.of(make_space(700, 1, 5000))


def reason_of(image: memoryview, layout: RecordLayout) -> str:
    with pytest.raises(RecordError) as caught:
        unpack_header(image, layout)
    return caught.value.reason


# --- layout ---


def test_layout_is_header_then_payload_rounded_to_device_blocks() -> None:
    assert (SMALL.header_bytes, SMALL.payload_bytes, SMALL.record_bytes) == (4096, 5701, 4096 + 8192)
    assert SMALL.part_offsets == (0, 700, 701, 5701)


def test_header_grows_with_parts_and_tokens_but_is_constant_in_a_space() -> None:
    assert RecordLayout.of(make_space(*[64] * 128, block_tokens=256)).header_bytes == 4096
    assert RecordLayout.of(make_space(64, block_tokens=2048)).header_bytes == 3 * 4096


def test_extents_are_aligned_and_merged() -> None:
    layout = RecordLayout.of(make_space(4096, 4096, 100, 4096, 8192))
    assert layout.extents(0b00000) == [(0, 4096)]
    assert layout.extents(0b00001) == [(0, 8192)]
    assert layout.extents(0b00010) == [(0, 4096), (8192, 12288)]
    assert layout.extents(0b10100) == [(0, 4096), (12288, 28672)]
    assert layout.extents(layout.all_parts) == [(0, layout.record_bytes)]


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=12), st.data())
def test_extents_cover_the_parts_and_stay_inside_the_record(sizes: list[int], data: st.DataObject) -> None:
    layout = RecordLayout.of(make_space(*sizes))
    mask = data.draw(st.integers(0, layout.all_parts))
    extents = layout.extents(mask)
    assert all(a % ALIGN == b % ALIGN == 0 for a, b in extents)
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(extents))
    assert extents[-1][1] <= layout.record_bytes
    for i in (i for i in range(layout.num_parts) if mask >> i & 1):
        start, stop = (layout.header_bytes + layout.part_offsets[i + d] for d in (0, 1))
        assert any(a <= start and stop <= b for a, b in extents)
        assert layout.extent(PartRun(i, i + 1))[0] <= start


# --- codec ---

headers: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    key=st.binary(min_size=16, max_size=16),
    parent=st.binary(min_size=16, max_size=16),
    shard=st.integers(0, 2**32 - 1),
    position=st.integers(0, 2**32 - 1),
    flags=st.integers(0, 2**16 - 1),
    stored_at=st.floats(0, 1e12),
    expires_at=st.floats(0, 1e12),
    tokens=st.binary(max_size=64),
    store=st.binary(min_size=8, max_size=8),
    sequence=st.integers(0, 2**64 - 1),
    part_crcs=st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3).map(lambda c: array("I", c)),
)


@given(headers)
def test_header_round_trip(fields: dict[str, object]) -> None:
    header = RecordHeader(fingerprint=SMALL.fingerprint, **fields)  # type: ignore[arg-type]
    image = memoryview(bytearray(b"\xff" * SMALL.record_bytes))
    pack_header(image, SMALL, header)
    with pytest.raises(RecordError):
        unpack_header(image, SMALL)
    stamp(image, SMALL, header.store, header.sequence)
    assert unpack_header(image, SMALL) == header
    assert all(byte == 0xFF for byte in image[SMALL.header_bytes :]), "the payload is not touched"


@given(headers, st.binary(min_size=8, max_size=8), st.integers(0, 2**64 - 1))
def test_stamp_changes_store_and_sequence_only(
    fields: dict[str, object], store: bytes, sequence: int
) -> None:
    image = memoryview(bytearray(SMALL.record_bytes))
    pack_header(image, SMALL, RecordHeader(fingerprint=SMALL.fingerprint, **fields))  # type: ignore[arg-type]
    stamp(image, SMALL, store, sequence)
    wanted = {**fields, "store": store, "sequence": sequence}
    assert unpack_header(image, SMALL) == RecordHeader(fingerprint=SMALL.fingerprint, **wanted)  # type: ignore[arg-type]


@settings(max_examples=400)
@given(st.integers(0, SMALL.header_bytes - 1), st.integers(1, 255))
def test_any_changed_header_byte_is_noticed(at: int, flip: int) -> None:
    image = make_image(SMALL, tokens=b"\x01\0\0\0" * 16)
    image[at] ^= flip
    with pytest.raises(RecordError):
        unpack_header(image, SMALL)


@settings(max_examples=400)
@given(st.integers(0, SMALL.payload_bytes - 1), st.integers(1, 255))
def test_any_changed_payload_byte_is_noticed_in_its_part(at: int, flip: int) -> None:
    image = make_image(SMALL)
    header = unpack_header(image, SMALL)
    assert bad_parts(SMALL, image, header, SMALL.all_parts) == 0
    SMALL.payload(image)[at] ^= flip
    part = next(i for i in range(3) if at < SMALL.part_offsets[i + 1])
    assert bad_parts(SMALL, image, header, SMALL.all_parts) == 1 << part
    assert bad_parts(SMALL, image, header, SMALL.all_parts & ~(1 << part)) == 0, "other parts are still good"


@given(st.integers(0, SMALL.header_bytes))
def test_a_header_cut_short_is_noticed(kept: int) -> None:
    image = make_image(SMALL, tokens=b"\xff" * 64)
    significant = SMALL.header_bytes - next(
        i for i, b in enumerate(reversed(image[: SMALL.header_bytes])) if b
    )
    image[kept : SMALL.header_bytes] = bytes(SMALL.header_bytes - kept)
    if kept < significant:
        assert reason_of(image, SMALL) in ("blank", "magic", "version", "fingerprint", "header_crc")


def test_part_crcs_of_some_parts() -> None:
    image = make_image(SMALL)
    every = part_crcs(SMALL, SMALL.payload(image))
    assert part_crcs(SMALL, SMALL.payload(image), [2, 0]) == array("I", [every[2], every[0]])
    assert SMALL.part(image, 1) == SMALL.payload(image)[700:701]


def test_reasons() -> None:
    assert reason_of(memoryview(bytearray(SMALL.record_bytes)), SMALL) == "blank"
    image = make_image(SMALL)
    image[0] ^= 1
    assert reason_of(image, SMALL) == "magic"
    image = make_image(SMALL)
    image[12] = 99
    assert reason_of(image, SMALL) == "version"
    assert (
        reason_of(make_image(RecordLayout.of(make_space(700, 1, 5000, tenant="other"))), SMALL)
        == "fingerprint"
    )
    image = make_image(SMALL)
    image[100] ^= 1
    assert reason_of(image, SMALL) in ("fingerprint", "header_crc")


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": b"short"},
        {"parent": b""},
        {"store": b"1"},
        {"fingerprint": bytes(32)},
        {"part_crcs": array("I", [1])},
        {"tokens": bytes(65)},
    ],
)
def test_a_header_that_does_not_fit_is_refused(wrong: dict[str, object]) -> None:
    good: dict[str, object] = {
        "key": KEY,
        "parent": ROOT_KEY,
        "fingerprint": SMALL.fingerprint,
        "shard": 0,
        "position": 0,
        "part_crcs": array("I", [1, 2, 3]),
        "stored_at": 0.0,
    }
    with pytest.raises(ValueError):
        pack_header(memoryview(bytearray(SMALL.record_bytes)), SMALL, RecordHeader(**{**good, **wrong}))  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=6), st.data())
def test_an_image_of_one_part_is_the_record_without_what_lies_between(
    sizes: list[int], data: st.DataObject
) -> None:
    layout = RecordLayout.of(make_space(*sizes))
    whole = make_image(layout, fill=bytes(range(251)))
    index = data.draw(st.integers(0, len(sizes) - 1))
    part = layout.of_part(index)
    image = memoryview(bytearray(part.record_bytes))
    for start, stop in part.extents(1 << index):
        assert start % ALIGN == stop % ALIGN == 0
        at = start + part.gap * (start > 0)
        image[start:stop] = whole[at : at + stop - start]
    assert part.part(image, index) == layout.part(whole, index)
    assert not bad_parts(part, image, unpack_header(image, part), 1 << index)
    assert part.record_bytes <= layout.header_bytes + sizes[index] + 2 * ALIGN

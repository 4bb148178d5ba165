"""Identity: frozen vectors, agreement of processes, and that any difference at all tells two spaces apart."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpurt.core.identity import (
    ROOT_KEY,
    Geometry,
    LayerGroup,
    PartRun,
    Space,
    block_key,
    chain_keys,
    check_same_space,
    conformance_vectors,
    digest_key,
    mask_runs,
)
from dpurt.errors import SpaceMismatch

VECTORS = Path(__file__).with_name("vectors.json")
REPO = Path(__file__).parents[2]
TRICKY = ["", "\0", "None", "_default", "é", "e\u0301", "ﬁ", "a:b", "0", "\ud800", " ", "n\0s"]


def plain(**changes: object) -> Space:
    group = LayerGroup(name="full", num_layers=32, num_kv_heads=8, head_size=128, part_bytes=65_536)
    fields: dict[str, object] = {
        "model": "llama",
        "revision": "r1",
        "kv_dtype": "bf16",
        "geometry": Geometry(block_tokens=16, groups=(group,)),
        "tenant": "acme",
        "salt": b"s3cret",
    }
    return Space(**(fields | changes))  # type: ignore[arg-type]


def spaces() -> dict[str, Space]:
    """The spaces of the frozen vectors. Add to them; never change one."""
    hybrid = Geometry(
        block_tokens=32,
        token_bytes=8,
        groups=(
            LayerGroup(name="full", num_layers=8, num_kv_heads=4, head_size=256, part_bytes=4096),
            LayerGroup(
                name="swa",
                num_layers=24,
                num_kv_heads=1,
                head_size=576,
                part_bytes=512,
                packing="mla",
                window_tokens=4096,
            ),
        ),
    )
    return {
        "plain": plain(),
        "no salt": plain(salt=b""),
        "long salt": plain(salt=bytes(range(256))),
        "empty strings": plain(model="", revision="", kv_dtype="", tenant=""),
        "lora": plain(lora_name="adapter", lora_version="3"),
        "lora of empty name": plain(lora_name="", lora_version=""),
        "parallel, later epoch": plain(tp_size=4, pp_size=2, epoch=17),
        "hybrid": plain(model="gemma-ü", geometry=hybrid),
    }


def frozen_form(space: Space) -> dict[str, object]:
    fingerprint = space.fingerprint()
    return {
        "encoding_sha256": hashlib.sha256(space.encode()).hexdigest(),
        "fingerprint": fingerprint.hex(),
        "conformance": [vector.hex() for vector in conformance_vectors(fingerprint)],
        "chain": [key.hex() for key in chain_keys(fingerprint, ROOT_KEY, bytes(range(70)), 32)],
        "digest_key": digest_key(fingerprint, b"engine digest").hex(),
    }


def frozen_forms() -> dict[str, object]:
    return {name: frozen_form(space) for name, space in spaces().items()}


@pytest.mark.parametrize("name", spaces())
def test_the_encoding_never_changes(name: str) -> None:
    """U2: a difference here makes every stored block unreachable. A new encoding gets a new name, not new vectors."""
    assert frozen_form(spaces()[name]) == json.loads(VECTORS.read_text())[name]


def test_every_frozen_vector_is_checked() -> None:
    assert set(json.loads(VECTORS.read_text())) == set(spaces())


def test_processes_with_different_hash_seeds_agree_bit_for_bit() -> None:
    """U1."""
    code = (
        "import importlib.util, json, sys\n"
        "spec = importlib.util.spec_from_file_location('identity_vectors', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['identity_vectors'] = module\n"
        "spec.loader.exec_module(module)\n"
        "print(json.dumps(module.frozen_forms()), hash('dpurt'))\n"
    )
    answers = []
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(REPO)}
        run = subprocess.run(
            [sys.executable, "-c", code, __file__], env=env, capture_output=True, text=True, check=True
        )
        answers.append(run.stdout.rsplit(maxsplit=1))
    assert answers[0][0] == answers[1][0]
    assert json.loads(answers[0][0]) == json.loads(VECTORS.read_text())
    assert answers[0][1] != answers[1][1], "the two processes hash alike, so this test shows nothing"


texts = st.sampled_from(TRICKY) | st.text(st.characters(), max_size=6)
texts_or_none = st.none() | texts
sizes = st.integers(1, 2**70)

group_fields: dict[str, st.SearchStrategy[object]] = {
    "name": texts,
    "num_layers": sizes,
    "num_kv_heads": sizes,
    "head_size": sizes,
    "part_bytes": sizes,
    "packing": texts,
    "window_tokens": st.none() | st.integers(0, 2**40),
}
space_fields: dict[str, st.SearchStrategy[object]] = {
    "model": texts,
    "revision": texts,
    "kv_dtype": texts,
    "tenant": texts,
    "salt": st.binary(max_size=80) | st.sampled_from([b"", b"\0", b"\0" * 64, b"None"]),
    "tp_size": sizes,
    "pp_size": sizes,
    "lora_name": texts_or_none,
    "lora_version": texts_or_none,
    "epoch": st.integers(0, 2**70),
}
groups = st.fixed_dictionaries(group_fields).map(lambda fields: LayerGroup(**fields))  # type: ignore[arg-type]
geometry_fields: dict[str, st.SearchStrategy[object]] = {
    "block_tokens": sizes,
    "token_bytes": st.sampled_from([4, 8]),
    "groups": st.lists(groups, min_size=1, max_size=3).map(tuple),
}
geometries = st.fixed_dictionaries(geometry_fields).map(lambda fields: Geometry(**fields))  # type: ignore[arg-type]
all_spaces = st.fixed_dictionaries(space_fields | {"geometry": geometries}).map(lambda f: Space(**f))  # type: ignore[arg-type]


def assert_disjoint(one: Space, other: Space) -> None:
    first, second = one.fingerprint(), other.fingerprint()
    assert first != second
    assert not set(conformance_vectors(first)) & set(conformance_vectors(second))
    tokens = bytes(64)
    assert not set(chain_keys(first, ROOT_KEY, tokens, 16)) & set(chain_keys(second, ROOT_KEY, tokens, 16))


@given(all_spaces, st.sampled_from(sorted(space_fields)), st.data())
def test_any_one_field_that_differs_gives_disjoint_keys(space: Space, name: str, data: st.DataObject) -> None:
    """U3-U8."""
    old = getattr(space, name)
    new = data.draw(space_fields[name].filter(lambda value: value != old))
    assert_disjoint(space, replace(space, **{name: new}))


@given(all_spaces, st.sampled_from(sorted(group_fields)), st.data())
def test_any_one_field_of_a_layer_group_that_differs_gives_disjoint_keys(
    space: Space, name: str, data: st.DataObject
) -> None:
    which = data.draw(st.integers(0, len(space.geometry.groups) - 1))
    old = getattr(space.geometry.groups[which], name)
    new = data.draw(group_fields[name].filter(lambda value: value != old))
    changed = list(space.geometry.groups)
    changed[which] = replace(changed[which], **{name: new})
    assert_disjoint(space, replace(space, geometry=replace(space.geometry, groups=tuple(changed))))


@given(all_spaces, st.sampled_from(sorted(geometry_fields)), st.data())
def test_any_other_geometry_gives_disjoint_keys(space: Space, name: str, data: st.DataObject) -> None:
    old = getattr(space.geometry, name)
    new = data.draw(geometry_fields[name].filter(lambda value: value != old))
    assert_disjoint(space, replace(space, geometry=replace(space.geometry, **{name: new})))


@given(texts, texts)
def test_text_cannot_move_from_one_field_to_the_next(left: str, right: str) -> None:
    if right:
        assert_disjoint(plain(model=left, revision=right), plain(model=left + right, revision=""))


@given(all_spaces)
def test_equal_spaces_agree_however_they_were_made(space: Space) -> None:
    again = replace(space)
    assert again.fingerprint() == space.fingerprint()
    check_same_space(space, replace(again, salt=b""), again.fingerprint())


@pytest.mark.parametrize(
    ("change", "field", "mine", "theirs"),
    [
        ({"model": "qwen"}, "model", "llama", "qwen"),
        ({"kv_dtype": "fp8"}, "kv_dtype", "bf16", "fp8"),
        ({"tp_size": 2}, "tp_size", 1, 2),
        ({"lora_name": ""}, "lora_name", None, ""),
        ({"lora_name": "None"}, "lora_name", None, "None"),
        ({"epoch": 3}, "epoch", 0, 3),
    ],
)
def test_a_refusal_names_the_field_and_both_values(
    change: dict[str, object], field: str, mine: object, theirs: object
) -> None:
    other = plain(**change)
    with pytest.raises(SpaceMismatch) as caught:
        check_same_space(plain(), other, other.fingerprint())
    assert (caught.value.field, caught.value.mine, caught.value.theirs) == (field, mine, theirs)
    for shown in (repr(field), repr(mine), repr(theirs)):
        assert shown in str(caught.value)


def reshaped(change: Callable[[LayerGroup], tuple[LayerGroup, ...]]) -> Space:
    space = plain()
    return replace(space, geometry=replace(space.geometry, groups=change(space.geometry.groups[0])))


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (reshaped(lambda group: (replace(group, packing="packed"),)), "geometry.groups[0].packing"),
        (reshaped(lambda group: (replace(group, window_tokens=0),)), "geometry.groups[0].window_tokens"),
        (reshaped(lambda group: (group, group)), "geometry.num_groups"),
    ],
)
def test_a_refusal_names_the_part_of_the_geometry(other: Space, field: str) -> None:
    """U51: an unknown layout is refused."""
    with pytest.raises(SpaceMismatch) as caught:
        check_same_space(plain(), other, other.fingerprint())
    assert caught.value.field == field


def test_a_differing_salt_is_refused_without_showing_either() -> None:
    mine, theirs = plain(salt=b"alpha-secret"), plain(salt=b"beta-secret")
    with pytest.raises(SpaceMismatch, match="secret") as caught:
        check_same_space(mine, theirs, theirs.fingerprint())
    assert caught.value.field == "salt"
    for text in (str(caught.value), repr(caught.value), repr(vars(caught.value)), repr(mine), str(mine)):
        assert "alpha" not in text
        assert "beta" not in text


def test_the_salt_is_not_in_what_travels() -> None:
    assert b"s3cret" not in plain().encode()


def test_an_empty_salt_is_a_key_of_its_own() -> None:
    """U8: the empty tenant cannot be told apart from no keying at all otherwise."""
    space = plain(salt=b"")
    unkeyed = hashlib.blake2b(space.encode(), digest_size=32, person=b"dpurt.space").digest()
    assert space.fingerprint() != unkeyed


def test_a_digest_key_is_never_a_token_key() -> None:
    fingerprint = plain().fingerprint()
    assert digest_key(fingerprint, ROOT_KEY + b"tokens") != block_key(fingerprint, ROOT_KEY, b"tokens")


@given(st.binary(max_size=100), st.integers(1, 40))
def test_chain_keys_are_block_keys_one_under_the_other_and_skip_a_partial_block(
    tokens: bytes, width: int
) -> None:
    fingerprint = plain().fingerprint()
    expected, parent = [], ROOT_KEY
    for n in range(len(tokens) // width):
        parent = block_key(fingerprint, parent, tokens[n * width : (n + 1) * width])
        expected.append(parent)
    assert chain_keys(fingerprint, ROOT_KEY, memoryview(tokens), width) == expected


def test_an_epoch_makes_all_old_blocks_unreachable() -> None:
    """U55."""
    assert_disjoint(plain(), plain().with_epoch(1))


@pytest.mark.parametrize(
    "make",
    [
        lambda: plain(tp_size=0),
        lambda: plain(pp_size=0),
        lambda: plain(epoch=-1),
        lambda: Geometry(block_tokens=0, groups=plain().geometry.groups),
        lambda: Geometry(block_tokens=1, groups=()),
        lambda: Geometry(block_tokens=1, groups=plain().geometry.groups * 129),
        lambda: Geometry(block_tokens=1, token_bytes=2, groups=plain().geometry.groups),
    ],
)
def test_a_space_that_cannot_be_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError):
        make()


def test_a_value_of_a_type_without_an_encoding_is_refused() -> None:
    for value in (True, 1.0, b"bytes"):
        with pytest.raises(TypeError, match="lora_name"):
            plain(lora_name=value).encode()


@given(st.integers(0, 2**128 - 1))
def test_part_mask_runs_round_trip_and_are_maximal(mask: int) -> None:
    runs = list(mask_runs(mask))
    assert sum(run.mask for run in runs) == mask
    assert all(one.stop < after.start for one, after in itertools.pairwise(runs))
    assert all(run.start < run.stop for run in runs)


def test_a_part_run_is_the_bits_from_start_to_stop() -> None:
    assert PartRun(2, 5).mask == 0b11100
    assert mask_runs(0b11100) == [PartRun(2, 5)]
    assert mask_runs(0) == []

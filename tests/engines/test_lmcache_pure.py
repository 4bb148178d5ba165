"""The LMCache adapter's pure parts: digests of keys, the choice of a space, tasks that end on a descriptor."""

from __future__ import annotations

import os
import select
from dataclasses import replace

import pytest

from dpurt.core.identity import Geometry, LayerGroup, Space
from dpurt.engines.lmcache.identity import Layout, Spaces, digest_of
from dpurt.engines.lmcache.tasks import Finished, Gathered
from dpurt.errors import SpaceMismatch


def space(model: str = "m", size: int = 8192, dtype: str = "float16") -> Space:
    group = LayerGroup(name="all", num_layers=2, num_kv_heads=2, head_size=16, part_bytes=size)
    geometry = Geometry(block_tokens=32, groups=(group,))
    return Space(model=model, revision="r", kv_dtype=dtype, geometry=geometry, tenant="t")


# --- identity ---


def test_every_field_of_a_key_changes_its_digest_and_no_two_run_together() -> None:
    keys = [
        (b"ab", 1, 0, ""), (b"abc", 1, 0, ""), (b"ab", 2, 0, ""), (b"ab", 1, 1, ""), (b"ab", 1, 0, "s"),
        (b"ab", 11, 0, ""), (b"ab", 1, 10, ""), (b"ab1", 1, 0, ""), (b"ab", 1, 0, "0s"),
    ]  # fmt: skip
    assert len({digest_of(*key) for key in keys}) == len(keys)


def test_digests_do_not_change_between_versions() -> None:
    frozen = "30dc276ff321266138eff78297262ae4787b177e1ad7b0207748831c8b30edbc"
    assert digest_of(bytes(32), 16777472, 0, "").hex() == frozen


def test_a_space_is_chosen_by_model_and_size() -> None:
    spaces = Spaces({"a": space("a"), "b": space("b"), "b-window": space("b", 2048)})
    assert spaces.choose("a", Layout(8192, "float16")) == "a"
    assert spaces.choose("b", Layout(8192, "")) == "b"
    assert spaces.choose("b", Layout(2048, "float16")) == "b-window"
    assert spaces.of_model("b") == ["b", "b-window"]
    assert spaces.of_model("c") == []


@pytest.mark.parametrize(
    ("model", "layout", "field", "theirs"),
    [
        ("c", Layout(8192, "float16"), "model", "c"),
        ("a", Layout(4096, "float16"), "payload_bytes", 4096),
        ("a", Layout(8192, "bfloat16"), "kv_dtype", "bfloat16"),
    ],
)
def test_what_fits_no_space_is_named(model: str, layout: Layout, field: str, theirs: object) -> None:
    with pytest.raises(SpaceMismatch) as caught:
        Spaces({"a": space("a")}).choose(model, layout)
    assert (caught.value.field, caught.value.theirs) == (field, theirs)


def test_two_spaces_of_one_size_differ_by_dtype() -> None:
    spaces = Spaces({"half": space(), "brain": replace(space(), kv_dtype="bfloat16")})
    assert spaces.choose("m", Layout(8192, "bfloat16")) == "brain"


# --- tasks ---


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def test_a_result_is_taken_once_and_signalled() -> None:
    finished: Finished[str] = Finished()
    assert not readable(finished.fileno())
    finished.put(3, "c")
    finished.put(4, "d")
    assert readable(finished.fileno())
    assert os.eventfd_read(finished.fileno()) == 2
    assert not readable(finished.fileno())
    assert (finished.take(3), finished.take(3)) == ("c", None)
    assert finished.take_all() == {4: "d"}
    assert finished.take_all() == {}
    finished.close()


def test_a_result_after_the_end_is_dropped() -> None:
    finished: Finished[str] = Finished()
    finished.close()
    finished.close()
    finished.put(1, "late")
    assert finished.take(1) is None


def test_answers_of_several_stores_are_put_together_once() -> None:
    seen: list[list[bool]] = []
    gathered = Gathered(4, 2, seen.append)
    gathered.add([0, 3], [True, False])
    assert seen == []
    gathered.add([1, 3], [False, True])
    assert seen == [[True, False, False, True]]


def test_a_task_for_no_store_ends_at_once() -> None:
    seen: list[list[bool]] = []
    Gathered(2, 0, seen.append)
    assert seen == [[False, False]]

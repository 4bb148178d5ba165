"""Topologies: what is accepted, and that what is refused is named by file, place, value and near names."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpurt import keys
from dpurt.config import Config, FileBdevConfig, config_from, load_config, ready_topologies
from dpurt.config.reading import parse_size
from dpurt.config.schema import safe_bytes
from dpurt.core.predictors import PREDICTORS
from dpurt.core.record import RecordLayout
from dpurt.errors import ConfigError

Tree = dict[str, Any]
PUBLIC = keys.generate().public


def tree() -> Tree:
    """A small, right topology."""
    return {
        "staging": {"bytes": "64 MiB"},
        "bdev": [{"name": "m", "kind": "memory", "size_bytes": "64 MiB", "segment_bytes": "4 MiB"}],
        "tenant": [{"name": "t", "salt": "sixteen bytes at least"}],
        "space": [
            {
                "name": "s", "model": "m", "revision": "r", "kv_dtype": "float16", "tenant": "t",
                "geometry": {
                    "block_tokens": 16,
                    "groups": [
                        {"name": "all", "num_layers": 2, "num_kv_heads": 1, "head_size": 64, "part_bytes": 16384}
                    ],
                },
            }
        ],
        "host": [{"name": "h", "spaces": ["s"]}],
    }  # fmt: skip


def changed(change: Callable[[Tree], object]) -> Tree:
    made = copy.deepcopy(tree())
    change(made)
    return made


def refusal(change: Callable[[Tree], object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        config_from(changed(change), "node.toml")
    assert caught.value.file == "node.toml"
    assert str(caught.value).startswith("node.toml: $")
    return caught.value


def second_space(t: Tree, **differences: object) -> bool:
    """Append one; False, so that lambdas can go on with `or`."""
    t["space"].append({**copy.deepcopy(t["space"][0]), "name": "s2", **differences})
    return False


# --- ready topologies ---


def test_ready_topologies_are_the_documented_ones() -> None:
    assert ready_topologies() == ["bluefield3", "bluefield4", "host-cpu", "laptop"]


@pytest.mark.parametrize("name", ready_topologies())
def test_ready_topology_loads_by_its_bare_name(name: str) -> None:
    config = load_config(name)
    assert config.node.name == name
    assert config.envelope is None or (config.envelope.model and config.envelope.source)


def test_laptop_runs_without_root_keys_or_files_and_its_space_has_an_identity() -> None:
    config = load_config("laptop")
    space = config.to_space("llama-3.2-1b")
    assert space.geometry.payload_bytes == 512 << 10
    assert len(space.fingerprint()) == 32
    assert not any("staging" in warning for warning in config.warnings())


def test_unknown_bare_name_lists_near_ones() -> None:
    with pytest.raises(ConfigError, match="did you mean laptop"):
        load_config("laptpo")


# --- errors name file, place, value, near names ---


def test_value_out_of_range_is_named_with_place_and_value() -> None:
    error = refusal(lambda t: t["space"][0]["geometry"].update(block_tokens=0))
    assert (error.where, error.problem) == ("$.space[0].geometry.block_tokens", "expected int >= 1, got 0")


def test_wrong_type_is_named_with_place_and_value() -> None:
    error = refusal(lambda t: t["host"][0].update(spaces="s"))
    assert (error.where, error.problem) == ("$.host[0].spaces", "expected array, got 's'")


@pytest.mark.parametrize(
    ("change", "where", "near"),
    [
        (lambda t: t.update(stagin={}), "$.stagin", "staging"),
        (lambda t: t["bdev"][0].update(segment_byte=1), "$.bdev[0].segment_byte", "segment_bytes"),
        (lambda t: t["space"][0].update(kv_type="x"), "$.space[0].kv_type", "kv_dtype"),
        (
            lambda t: t["space"][0]["geometry"]["groups"][0].update(part_byte=1),
            "$.space[0].geometry.groups[0].part_byte",
            "part_bytes",
        ),
        (lambda t: t.update(gateway={"curve": {"secret_key": "x"}}), "$.gateway.curve.secret_key", "secret_key_file"),
    ],
)  # fmt: skip
def test_unknown_key_is_named_with_its_neighbours(
    change: Callable[[Tree], object], where: str, near: str
) -> None:
    error = refusal(change)
    assert error.where == where
    assert error.problem.startswith("unknown key; did you mean ")
    assert near in error.problem


def test_missing_key_is_named() -> None:
    error = refusal(lambda t: t["space"][0].pop("revision"))
    assert (error.where, error.problem) == ("$.space[0]", "'revision' is missing")


def test_word_outside_a_choice_is_answered_with_the_choice() -> None:
    error = refusal(lambda t: t["host"][0].update(fabrics=["shm", "rdma"]))
    assert (error.where, error.problem) == (
        "$.host[0].fabrics[1]",
        "invalid enum value 'rdma'; one of: 'shm', 'tcp', 'verbs'",
    )
    error = refusal(lambda t: t["bdev"][0].update(kind="fil"))
    assert error.where == "$.bdev[0].kind"
    assert "one of: file, memory, modelled, vhost-user, nvme-tcp, nvme-rdma, spdk" in error.problem


def test_unreadable_and_broken_files_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: \$: cannot read"):
        load_config(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[staging\n")
    with pytest.raises(ConfigError, match=r"broken\.toml: \$: is not TOML: .*line 1"):
        load_config(broken)
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config(str(broken))


def test_a_refused_salt_is_not_shown() -> None:
    error = refusal(lambda t: t["tenant"][0].update(salt="short secret"))
    assert error.where == "$.tenant[0].salt"
    assert "short secret" not in str(error)


# --- sizes ---


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("16 GiB", 16 << 30), ("1.5MiB", 3 << 19), ("14 GB", 14 * 10**9), (" 2 kB ", 2000)],
)  # fmt: skip
def test_size_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@given(st.integers(0, 2**50), st.sampled_from(["", "B", "KiB", "MiB", "kB", "GB"]))
def test_size_text_is_a_multiple_of_its_unit(count: int, unit: str) -> None:
    assert parse_size(f"{count}{unit}") == count * parse_size(f"1{unit}")


@pytest.mark.parametrize("text", ["", "GiB", "-1 GiB", "1 gib", "1 Gb", "1_000", "1e9", "1 GiB more"])
def test_what_is_no_size_is_refused(text: str) -> None:
    error = refusal(lambda t: t["staging"].update(bytes=text))
    assert error.where == "$.staging.bytes"
    assert "'16 GiB'" in error.problem


# --- rules between tables ---


@pytest.mark.parametrize(
    ("change", "where", "problem"),
    [
        (lambda t: second_space(t, name="s"), "$.space[1].name", "twice"),
        (lambda t: t["space"][0].update(tp_size=820, pp_size=5), "$.space[0]", "the 4,096 ranks a space may have"),
        (lambda t: t["host"].append(t["host"][0]), "$.host[1].name", "twice"),
        (lambda t: t["space"][0].update(tenant="other"), "$.space[0].tenant", "no tenant 'other'"),
        (lambda t: t["host"][0].update(spaces=["s", "x"]), "$.host[0].spaces[1]", "no space 'x'"),
        (lambda t: t["host"][0].update(inbound_bytes=20000), "$.host[0].inbound_bytes", "do not hold one block"),
        (lambda t: t["staging"].update(bytes=80000), "$.space[0]", "fewer than 4"),
        (lambda t: t["bdev"][0].update(segment_bytes=65536), "$.bdev[0].segment_bytes", "hold 2 blocks"),
        (lambda t: t["bdev"][0].update(segment_bytes=4097), "$.bdev[0]", "multiple of 4096"),
        (lambda t: t["bdev"][0].update(segment_bytes="32 MiB"), "$.bdev[0]", "fewer than 4 segments"),
        (lambda t: t["bdev"][0].update(capacity_bytes="65 MiB"), "$.bdev[0]", "more than size_bytes"),
        (lambda t: t["bdev"].clear(), "$.bdev", "length >= 1"),
        (lambda t: t["bdev"][0].update(drive_writes_per_day=0), "$.bdev[0].drive_writes_per_day", "> 0"),
        (
            lambda t: t["bdev"].append({**t["bdev"][0], "name": "n", "drive_writes_per_day": 1}), "$.bdev",
            "one budget of all bdevs",
        ),
        (lambda t: t["staging"].update(eviction="rlu"), "$.staging.eviction", "known: fifo"),
        (lambda t: second_space(t, staging_share=0.7) or t["space"][0].update(staging_share=0.4), "$.space", "more than 1"),
        (lambda t: t["space"][0].update(lora_name="a"), "$.space[0]", "go together"),
        (
            lambda t: t["tenant"].append({**t["tenant"][0], "name": "u"}) or second_space(t, tenant="u", domain="t")
            or t["space"].reverse(),
            "$.space[1].domain",
            "also the trust domain",
        ),
        (
            lambda t: t.update(link=[{"host": "g", "fabric": "shm", "bandwidth_bytes_per_s": 1, "latency_us": 1}]),
            "$.link[0].host",
            "no host 'g'",
        ),
        (lambda t: t["node"].update(run_dir="/" + "x" * 120), "$.node.run_dir", "too long for a Unix socket"),
        (
            lambda t: t.update(
                envelope={
                    "cores": 1, "dram_bytes": "65 MiB", "link_bytes_per_s": 1, "device_bytes_per_s": 1,
                    "device_latency_us": 1, "source": "test",
                }
            ),
            "$.staging.bytes",
            "DRAM has",
        ),
    ],
)  # fmt: skip
def test_tables_that_contradict_each_other_are_refused(
    change: Callable[[Tree], object], where: str, problem: str
) -> None:
    error = refusal(lambda t: t.update(node={}) or change(t))
    assert error.where == where
    assert problem in error.problem


@pytest.mark.parametrize(
    "bind", ["tcp://0.0.0.0:7571", "tcp://192.0.2.1:7571", "tcp://[::]:7571", "tcp://some-name:7571"]
)
def test_bind_that_others_reach_needs_curve_keys(bind: str) -> None:
    assert "needs [gateway.curve] keys" in refusal(lambda t: t.update(gateway={"bind": bind})).problem
    assert "needs [gateway.curve] keys" in refusal(lambda t: t.update(fabric={"tcp_bind": bind})).problem
    curve = {"secret_key_file": "k", "authorized_keys_dir": "d"}
    assert (
        config_from(changed(lambda t: t.update(gateway={"bind": bind, "curve": curve}))).gateway.bind == bind
    )


@pytest.mark.parametrize(
    "bind", ["tcp://127.0.0.1:1", "tcp://[::1]:0", "tcp://localhost:7571", "ipc:///run/x.sock"]
)
def test_local_bind_needs_no_keys(bind: str) -> None:
    assert config_from(changed(lambda t: t.update(gateway={"bind": bind}))).gateway.curve is None


@pytest.mark.parametrize("bind", ["tcp://*:7571", "tcp://127.0.0.1", "127.0.0.1:7571", "udp://127.0.0.1:1"])
def test_bind_must_be_a_whole_address(bind: str) -> None:
    error = refusal(lambda t: t.update(gateway={"bind": bind}))
    assert error.where == "$.gateway"
    assert "expected" in error.problem


def test_curve_without_any_known_client_is_refused() -> None:
    curve = {"secret_key_file": "k"}
    assert "no client could ever" in refusal(lambda t: t.update(gateway={"curve": curve})).problem
    config = config_from(
        changed(lambda t: t.update(gateway={"curve": curve}) or t["host"][0].update(public_key=PUBLIC))
    )
    assert config.authorized_keys() == {PUBLIC}


def test_metrics_beyond_loopback_are_refused() -> None:
    assert "not loopback" in refusal(lambda t: t.update(metrics={"bind": "192.0.2.1:9571"})).problem
    assert config_from(changed(lambda t: t.update(metrics={"bind": "127.0.0.1:0"}))).metrics.bind


# --- salts and spaces ---


def test_salt_comes_from_one_named_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys.write_secret(tmp_path / "salt", "0123456789abcdef")
    monkeypatch.setenv("DPURT_TEST_SALT", "0123456789abcdef")
    sources = ({"salt_file": "salt"}, {"salt_env": "DPURT_TEST_SALT"}, {"salt": "0123456789abcdef"})
    fingerprints = set()
    for source in sources:
        made = tree()
        made["tenant"] = [{"name": "t", **source}]
        fingerprints.add(config_from(made, "", tmp_path).to_space("s").fingerprint())
    assert len(fingerprints) == 1


@pytest.mark.parametrize(
    "tenant",
    [{}, {"salt_file": "f", "salt_env": "E"}, {"salt_env": "E", "allow_empty_salt": True}],
)
def test_no_salt_two_salts_or_both_is_refused(tenant: Tree) -> None:
    error = refusal(lambda t: t.update(tenant=[{"name": "t", **tenant}]))
    assert error.where == "$.tenant[0]"


def test_missing_short_or_readable_salt_is_refused_when_needed(tmp_path: Path) -> None:
    config = config_from(changed(lambda t: t.update(tenant=[{"name": "t", "salt_file": "f"}])), "", tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        config.to_space("s")
    (tmp_path / "f").write_text("0123456789abcdef")
    (tmp_path / "f").chmod(0o640)
    with pytest.raises(ConfigError, match=r"0640.*chmod 600"):
        config.to_space("s")
    (tmp_path / "f").write_text("0123456789abcde\n")
    (tmp_path / "f").chmod(0o600)
    with pytest.raises(ConfigError, match="at least 16 bytes, has 15"):
        config.to_space("s")


def test_empty_salt_must_be_asked_for_and_is_warned_about() -> None:
    config = config_from(changed(lambda t: t.update(tenant=[{"name": "t", "allow_empty_salt": True}])))
    assert config.to_space("s").salt == b""
    assert any("no salt" in warning for warning in config.warnings())


def test_space_carries_every_field_of_its_table() -> None:
    def all_set(t: Tree) -> None:
        t["space"][0].update(tp_size=4, pp_size=2, lora_name="l", lora_version="3")
        t["space"][0]["geometry"].update(token_bytes=8)
        t["space"][0]["geometry"]["groups"][0].update(packing="mla", window_tokens=128)

    space = config_from(changed(all_set)).to_space("s")
    assert (space.num_shards, space.lora_name, space.lora_version, space.epoch) == (8, "l", "3", 0)
    assert space.geometry.token_bytes == 8
    assert (space.geometry.groups[0].packing, space.geometry.groups[0].window_tokens) == ("mla", 128)


def test_unknown_space_is_a_config_error_that_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="no space 'x'; known: s"):
        config_from(tree()).to_space("x")


def test_record_bytes_do_not_need_the_salt_and_are_the_layouts() -> None:
    config = config_from(tree())
    assert config.space[0].record_bytes == RecordLayout.of(config.to_space("s")).record_bytes


# --- staging, bdevs, run folder ---


def test_staging_plan_honours_shares_and_splits_the_rest_by_domain() -> None:
    def three(t: Tree) -> None:
        t["space"][0].update(staging_share=0.5)
        second_space(t, name="s2", staging_share=None, domain="pool")
        second_space(t, name="s3", staging_share=None, domain="pool")
        for space in t["space"][1:]:
            del space["staging_share"]

    plan = config_from(changed(three)).staging_plan()
    assert plan == {"t": {"s": 32 << 20}, "pool": {"s2": 16 << 20, "s3": 16 << 20}}


@pytest.mark.parametrize(("carried", "is_warned"), [("1 GiB", False), ("1 GB", True)])
def test_placing_more_than_a_link_carries_is_warned_about(carried: str, is_warned: bool) -> None:
    link = {"host": "h", "fabric": "shm", "bandwidth_bytes_per_s": carried, "latency_us": 1}
    said = config_from(changed(lambda t: t.update(link=[link]))).warnings()
    assert any("shm link to host 'h'" in warning for warning in said) is is_warned


def test_staging_below_twice_the_lookahead_is_warned_about() -> None:
    few = config_from(changed(lambda t: t["staging"].update(bytes="1 MiB")))
    assert any("limit the hit rate" in warning for warning in few.warnings())
    assert not any("limit the hit rate" in warning for warning in config_from(tree()).warnings())


def test_parts_that_contradict_the_geometry_are_warned_about() -> None:
    def of(**space: object) -> list[str]:
        made = changed(lambda t: t["space"][0].update(**space))
        made["space"][0]["geometry"]["groups"][0].update(part_bytes=16 * 2 * 2 * 1 * 64 * 2)
        return [warning for warning in config_from(made).warnings() if "part_bytes" in warning]

    assert of() == of(kv_dtype="bf16") == []
    assert "come to: 16,384" in of(kv_dtype="float32")[0]
    assert of(kv_dtype="float32", tp_size=2) == []
    assert of(kv_dtype="something-new") == []
    for name in ready_topologies():
        assert not any("part_bytes" in warning for warning in load_config(name).warnings())


def file_config(tmp_path: Path, **differences: object) -> tuple[Config, FileBdevConfig]:
    bdev = {"name": "f", "kind": "file", "path": "kv.img", "size_bytes": "1 GiB", "segment_bytes": "4 MiB"}
    config = config_from(
        changed(lambda t: t.update(bdev=[{**bdev, **differences}], node={"run_dir": str(tmp_path)}))
    )
    [made] = config.bdev
    assert isinstance(made, FileBdevConfig)
    return config, made


def test_relative_bdev_path_is_in_the_run_folder(tmp_path: Path) -> None:
    config, bdev = file_config(tmp_path)
    assert bdev.kind == "file"
    assert bdev.open_params(config)["path"] == tmp_path / "kv.img"


def test_byte_cap_defaults_to_the_size_but_never_to_more_than_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, bdev = file_config(tmp_path)
    assert bdev.capacity(config) == min(1 << 30, safe_bytes(tmp_path / "kv.img"))
    monkeypatch.setattr("dpurt.config.schema.safe_bytes", lambda path: 100 << 20)
    assert bdev.capacity(config) == 100 << 20
    monkeypatch.setattr("dpurt.config.schema.safe_bytes", lambda path: 1 << 20)
    with pytest.raises(ConfigError, match="free some space"):
        bdev.capacity(config)
    config, bdev = file_config(tmp_path, capacity_bytes="200 MiB")
    assert bdev.capacity(config) == 200 << 20


def test_a_file_is_made_as_large_as_its_safe_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, bdev = file_config(tmp_path)
    monkeypatch.setattr("dpurt.config.schema.safe_bytes", lambda path: 100 << 20)
    assert bdev.open_params(config)["size_bytes"] == 100 << 20


def test_the_room_in_dev_does_not_limit_a_device_even_a_missing_one(tmp_path: Path) -> None:
    config, bdev = file_config(tmp_path, path="/dev/dpurt-absent0n1", size_bytes="64 TiB")
    assert bdev.open_params(config)["size_bytes"] == bdev.capacity(config) == 64 << 40


def test_safe_bytes_count_what_the_file_holds_as_free(tmp_path: Path) -> None:
    file = tmp_path / "kv.img"
    file.write_bytes(bytes(1 << 20))
    disk = os.statvfs(tmp_path)
    assert safe_bytes(file) <= 0.8 * (disk.f_blocks * disk.f_frsize + (1 << 20))
    assert safe_bytes(tmp_path / "not" / "there" / "kv.img") > 0


def test_file_without_size_and_cap_is_refused() -> None:
    error = refusal(lambda t: t.update(bdev=[{"name": "f", "kind": "file", "path": "x"}]))
    assert "a byte cap is mandatory" in error.problem


def test_modelled_bdev_carries_its_profile() -> None:
    profile = {
        "read_latency_us": 100,
        "write_latency_us": 20,
        "read_bytes_per_s": "14 GB",
        "write_bytes_per_s": "7 GB",
    }
    bdev = {
        "name": "f",
        "kind": "modelled",
        "size_bytes": "64 MiB",
        "segment_bytes": "4 MiB",
        "profile": profile,
    }
    config = config_from(changed(lambda t: t.update(bdev=[bdev])))
    made = config.bdev[0].open_params(config)["profile"]
    assert (made.read_latency_s, made.read_bytes_per_s) == (100e-6, 14e9)  # type: ignore[attr-defined]


def test_run_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    node = config_from(tree()).node
    assert node.make_run_dir() == tmp_path / "dpurt-dpurt"
    assert node.run_path.stat().st_mode & 0o777 == 0o700
    assert node.make_run_dir() == node.run_path
    node.run_path.chmod(0o755)
    with pytest.raises(ConfigError, match="others can enter"):
        node.make_run_dir()


@pytest.mark.parametrize(("mode", "is_right"), [(0o700, True), (0o755, True), (0o775, False), (0o777, False)])
def test_a_named_run_folder_that_others_can_write_is_refused(
    mode: int, is_right: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    node = config_from(changed(lambda t: t.update(node={"run_dir": str(folder)}))).node
    if is_right:
        assert node.make_run_dir() == folder
        return
    with pytest.raises(ConfigError, match="others can write"):
        node.make_run_dir()


def test_relative_files_belong_to_the_topologys_folder(tmp_path: Path) -> None:
    text = (
        '[staging]\nbytes = "64 MiB"\n[[bdev]]\nname = "m"\nkind = "memory"\nsize_bytes = "64 MiB"\n'
        'segment_bytes = "4 MiB"\n[[tenant]]\nname = "t"\nsalt_file = "salt"\n[[space]]\nname = "s"\nmodel = "m"\n'
        'revision = "r"\nkv_dtype = "x"\ntenant = "t"\n[space.geometry]\nblock_tokens = 16\n'
        '[[space.geometry.groups]]\nname = "g"\nnum_layers = 1\nnum_kv_heads = 1\nhead_size = 1\npart_bytes = 4096\n'
    )
    (tmp_path / "node.toml").write_text(text)
    assert load_config(tmp_path / "node.toml").tenant[0].salt_file == str(tmp_path / "salt")


def test_default_predictors_are_ones_that_exist() -> None:
    assert set(config_from(tree()).prefetch.predictors) <= set(PREDICTORS)


# --- engines ---


def engine(**fields: Any) -> Callable[[Tree], object]:
    return lambda t: t.update(engine=[{"name": "e", "kind": "vllm", "space": "s", **fields}])


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "either events"),
        ({"events": ["tcp://127.0.0.1:1"], "discovery": "http://127.0.0.1:1"}, "either events"),
        ({"events": ["tcp://127.0.0.1:1"], "replay": ["ipc:///a", "ipc:///b"]}, "2 replay endpoints for 1"),
        ({"events": ["udp://127.0.0.1:1"]}, "expected tcp"),
        ({"events": ["tcp://192.0.2.1:1"], "bind": True}, "not loopback"),
        ({"discovery": "https://127.0.0.1"}, "expected http://"),
        ({"events": ["ipc:///a"], "space": "other"}, "no space 'other'"),
        ({"events": ["ipc:///a"], "loras": {"a": "other"}}, "no space 'other'"),
        ({"events": ["ipc:///a"], "kind": "other"}, "one of: 'sglang', 'vllm'"),
    ],
)
def test_an_engine_that_cannot_be_followed_is_refused(fields: Tree, problem: str) -> None:
    assert problem in str(refusal(engine(**fields)))


def test_engines_have_names_of_their_own() -> None:
    twice = [{"name": "e", "kind": "sglang", "space": "s", "events": ["ipc:///a"]}] * 2
    assert "twice" in str(refusal(lambda t: t.update(engine=twice)))


def test_the_routing_page_is_for_loopback_only() -> None:
    assert "not loopback" in str(refusal(lambda t: t.update(router={"bind": "192.0.2.1:80"})))


def test_an_engine_that_cannot_replay_is_warned_of() -> None:
    config = config_from(changed(engine(events=["ipc:///a"])), "node.toml")
    assert any("no replay endpoint" in warning for warning in config.warnings())
    config = config_from(changed(engine(events=["ipc:///a"], replay=["ipc:///b"])), "node.toml")
    assert not any("replay" in warning for warning in config.warnings())


# --- rails ---


def test_rails_are_the_tables_or_the_one_device_and_hosts_name_only_known_ones() -> None:
    data = tree()
    assert [rail.name for rail in config_from(data).rails()] == ["rdma"]
    data["rail"] = [
        {"name": "a", "address": "10.0.0.1", "switch": "x"},
        {"name": "b", "device": "mlx5_1", "numa": 1},
    ]
    rails = config_from(data).rails()
    assert [(rail.name, rail.switch, rail.numa) for rail in rails] == [("a", "x", None), ("b", "", 1)]
    data["host"] = [{"name": "h", "spaces": ["s"], "rails": ["a", "c"]}]
    with pytest.raises(ConfigError, match=r"host\[0\].rails\[1\].*no rail 'c'; known: a, b"):
        config_from(data)
    data["host"] = []
    data["rail"] = [{"name": "a"}]
    with pytest.raises(ConfigError, match="rail 'a': give device, address or both"):
        config_from(data)

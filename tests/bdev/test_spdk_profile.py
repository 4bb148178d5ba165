"""Profiles: strict to read, planned without a target, applied to a fake and to a real one with the same result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from dpurt.bdev.spdk_apply import ProfileRefused, apply, load_keys, look
from dpurt.bdev.spdk_plan import Call, plan
from dpurt.bdev.spdk_profile import KeyMaterial, Profile, parse_profile
from dpurt.bdev.spdk_rpc import open_spdk_rpc
from dpurt.bdev.spdk_state import TargetState
from dpurt.commands.spdk import PROFILES, ready_profiles
from dpurt.errors import ConfigError, RpcError
from dpurt.testing.fake_spdk.rpc_server import FakeRpcServer
from dpurt.testing.fake_spdk.state import FakeTarget
from dpurt.testing.spdk_profiles import KEY, KEY2, key_file, on_disk

if TYPE_CHECKING:
    from tests.bdev.conftest import Live

SETTINGS = {
    "FILE": "/d/a", "FILE_A": "/d/a", "FILE_B": "/d/b", "PCI": "0000:01:00.0", "KEY_FILE": "/d/key",
}  # fmt: skip


def ready(name: str, **chosen: str) -> Profile:
    """A ready profile, with a value for all that has no default."""
    text = (PROFILES / f"{name}.json").read_bytes()
    declared = json.loads(text)["variables"]
    return parse_profile(text, {**{k: v for k, v in SETTINGS.items() if k in declared}, **chosen})


def made(**tree: object) -> Profile:
    return parse_profile(json.dumps({"about": "a test", **tree}), {})


def malloc(name: str = "M0", blocks: int = 256) -> dict[str, object]:
    return {
        "name": name,
        "method": "bdev_malloc_create",
        "params": {"name": name, "num_blocks": blocks, "block_size": 4096},
    }


def shown(name: str, **more: object) -> dict[str, Any]:
    """A bdev as a target shows it."""
    return {
        "name": name, "aliases": [], "product_name": "Malloc disk", "num_blocks": 256, "block_size": 4096,
        "uuid": f"u-{name}", "claimed": False, "assigned_rate_limits": {}, "driver_specific": {}, **more,
    }  # fmt: skip


def refusal(profile: Profile, state: TargetState, keys: Mapping[str, KeyMaterial] | None = None) -> str:
    planned = plan(profile, state, keys or {})
    assert len(planned.refused) == 1, planned
    return planned.refused[0]


# --- reading ---


@pytest.mark.parametrize("name", ready_profiles())
@pytest.mark.parametrize("export", ["vhost", "nvmf-tcp"])
def test_every_ready_profile_plans_on_an_empty_target(name: str, export: str) -> None:
    profile = ready(name, EXPORT=export)
    planned = plan(profile, TargetState(), {key.name: KeyMaterial(KEY, KEY2) for key in profile.keys})
    assert planned.refused == []
    methods = [call.method for call in planned.calls]
    assert [entry.method for entry in profile.bdevs] == [
        m for m in methods if m.startswith("bdev_") and "qos" not in m
    ]
    assert ("vhost_create_blk_controller" in methods) == (export == "vhost")
    assert ("nvmf_subsystem_add_listener" in methods) == (export == "nvmf-tcp")


def test_the_ready_profiles_are_those_the_readme_promises() -> None:
    promised = {
        "malloc",
        "aio",
        "uring",
        "nvme-pcie",
        "lvol",
        "crypto",
        "raid0",
        "delay",
        "error",
        "throttle",
    }
    assert set(ready_profiles()) == promised


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"bdev": []}, "unknown field `bdev`"),
        ({"bdevs": [{**malloc(), "size": 1}]}, "unknown field `size`"),
        ({"bdevs": [malloc(), malloc()]}, "'M0' is used twice"),
        ({"bdevs": [{"name": "x", "method": "bdev_nvme_reset", "params": {}}]}, "not one a profile may use"),
        ({"bdevs": [{"name": "x", "method": "bdev_malloc_create", "params": {"nam": 1}}]}, "no parameter 'nam'"),
        ({"bdevs": [{"name": "x", "method": "bdev_aio_create", "params": {"name": "x"}}]}, "needs the parameter 'filen"),
        ({"bdevs": [{**malloc(), "name": "M1"}]}, "does not make 'M1'"),
        ({"exports": [{"via": "iscsi", "bdev": "x"}]}, "Invalid enum value 'iscsi'"),
        ({"exports": [{"via": "vhost", "bdev": "x", "controller": "../x"}]}, "a plain file name"),
        ({"exports": [{"via": "nvmf-tcp", "bdev": "x", "nqn": "x"}]}, "needs an nqn"),
        ({"exports": [{"via": "vhost", "bdev": "x", "controller": "c"}] * 2}, "exported twice"),
        ({"qos": [{"bdev": "x", "rw_ios_per_sec": -1}]}, "Expected `int` >= 0"),
        ({"bdevs": [{"name": "${X}", "method": "m"}]}, "${X} is not among"),
        ({"about": "${x}"}, "a variable is written"),
        ({"variables": {"A": None}}, "no value for A"),
        ({"variables": {"A": "x"}, "qos": [{"bdev": "b", "rw_ios_per_sec": "${A:int}"}]}, "must be a whole number"),
        ({"variables": {"A": "1"}, "about": "x${A:int}"}, "must be the whole value"),
    ],
)  # fmt: skip
def test_wrong_profile_is_refused_with_the_place(tree: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(**tree)
    assert problem in str(caught.value)


def test_setting_that_the_profile_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="BLOCK is no variable of this profile; it has: BLOCKS, EXPORT"):
        ready("malloc", BLOCK="1")


def test_environment_is_no_source_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FILE", "/from/env")
    with pytest.raises(ConfigError, match="no value for FILE"):
        parse_profile((PROFILES / "aio.json").read_bytes(), {})


@pytest.mark.parametrize("address", ["::", "0" + ".0.0.0"])
def test_export_on_every_interface_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="every interface"):
        ready("malloc", EXPORT="nvmf-tcp", ADDRESS=address)


def test_export_beyond_loopback_must_name_its_hosts() -> None:
    export = {"via": "nvmf-tcp", "bdev": "M0", "nqn": "nqn.2026-11.io.x:y", "address": "192.0.2.1"}
    with pytest.raises(ConfigError, match="list the NQNs"):
        made(bdevs=[malloc()], exports=[export])
    host = "nqn.2026-11.io.x:host"
    calls = plan(made(bdevs=[malloc()], exports=[{**export, "hosts": [host]}]), TargetState(), {}).calls
    assert Call("nvmf_subsystem_add_host", {"nqn": export["nqn"], "host": host}) in calls
    assert [c.params["allow_any_host"] for c in calls if c.method == "nvmf_create_subsystem"] == [False]


WORDS = st.sampled_from(["about", "variables", "bdevs", "exports", "keys", "name", "via"])
TREES = st.recursive(
    st.none() | st.text(max_size=5) | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | TREES.map(lambda tree: json.dumps(tree).encode()))
def test_any_bytes_are_a_profile_or_a_config_error(text: bytes) -> None:
    try:
        parse_profile(text, {})
    except ConfigError:
        pass


# --- planning ---


def test_what_is_as_wanted_needs_no_call() -> None:
    profile = made(bdevs=[malloc()], qos=[{"bdev": "M0", "rw_ios_per_sec": 1500}])
    bdev = shown("M0", assigned_rate_limits={"rw_ios_per_sec": 2000})
    planned = plan(profile, TargetState(bdevs=[bdev]), {})
    assert (planned.calls, planned.refused) == ([], [])
    assert planned.kept == ["M0", "limits of M0"]


def test_difference_in_size_is_refused_by_name() -> None:
    text = refusal(made(bdevs=[malloc(blocks=512)]), TargetState(bdevs=[shown("M0")]))
    assert "M0 exists with num_blocks 256 instead of 512" in text
    assert "lose its data" in text


def test_bdev_of_another_kind_under_the_name_is_refused() -> None:
    text = refusal(made(bdevs=[malloc()]), TargetState(bdevs=[shown("M0", product_name="AIO disk")]))
    assert "M0 exists with the kind 'AIO disk'" in text


def test_limit_is_changed_live_and_only_it() -> None:
    profile = made(bdevs=[malloc()], qos=[{"bdev": "M0", "r_mbytes_per_sec": 20}])
    planned = plan(profile, TargetState(bdevs=[shown("M0")]), {})
    assert planned.calls == [Call("bdev_set_qos_limit", {"name": "M0", "r_mbytes_per_sec": 20})]


def test_delay_is_changed_live_within_the_targets_rounding() -> None:
    profile = ready("delay", READ_US="200000", WRITE_US="1000")
    delay = {"base_bdev_name": "Malloc0", "avg_read_latency": 199_950, "p99_read_latency": 5,
             "avg_write_latency": 1000, "p99_write_latency": 1001}  # fmt: skip
    base = shown("Malloc0", num_blocks=8192, claimed=True)
    state = TargetState(bdevs=[base, shown("Delay0", product_name="delay", driver_specific={"delay": delay})])
    changes = [call for call in plan(profile, state, {}).calls if call.method.startswith("bdev")]
    wanted = {"delay_bdev_name": "Delay0", "latency_type": "p99_read", "latency_us": 200_000}
    assert changes == [Call("bdev_delay_update_latency", wanted)]


def test_missing_base_is_refused_by_name_of_both() -> None:
    entry = {"name": "EE_X", "method": "bdev_error_create", "params": {"base_name": "X"}}
    assert "EE_X needs X" in refusal(made(bdevs=[entry]), TargetState())
    assert "limit of Y needs Y" in refusal(made(qos=[{"bdev": "Y", "rw_ios_per_sec": 1}]), TargetState())


def test_logical_volumes_on_a_disk_that_came_back_are_kept() -> None:
    profile = ready("lvol", SIZE_MIB="5")
    aio = shown("Aio0", product_name="AIO disk", driver_specific={"aio": {"filename": "/d/a"}}, claimed=True)
    lvol = shown("u1", aliases=["dpurt/kv"], product_name="Logical Volume", uuid="u1", num_blocks=2048,
                 driver_specific={"lvol": {"thin_provision": False}})  # fmt: skip
    store = {"name": "dpurt", "base_bdev": "Aio0", "cluster_size": 4 << 20}
    planned = plan(profile, TargetState(bdevs=[aio, lvol], lvstores=[store]), {})
    assert planned.refused == []
    assert [call.method for call in planned.calls] == ["vhost_create_blk_controller"]
    assert "dpurt/kv exists with 16 MiB" in refusal(
        profile, TargetState(bdevs=[aio, {**lvol, "num_blocks": 4096}], lvstores=[store])
    )


def test_bdev_exported_one_way_is_not_exported_another_way() -> None:
    over_vhost = {"ctrlr": "c", "backend_specific": {"block": {"bdev": "Malloc0"}}}
    there = shown("Malloc0", num_blocks=8192)
    text = refusal(ready("malloc", EXPORT="nvmf-tcp"), TargetState(bdevs=[there], vhost=[over_vhost]))
    assert "Malloc0 is taken by vhost controller c" in text
    claimed = {**there, "claimed": True, "claim_type": "exclusive_write"}
    assert "taken by exclusive_write" in refusal(ready("malloc"), TargetState(bdevs=[claimed]))


def test_vhost_name_that_exports_something_else_is_refused() -> None:
    other = {"ctrlr": "Malloc0", "backend_specific": {"block": {"bdev": "Other"}}}
    state = TargetState(bdevs=[shown("Malloc0", num_blocks=8192)], vhost=[other])
    assert "controller Malloc0 exists and exports Other" in refusal(ready("malloc"), state)


def test_transport_of_another_size_is_refused_only_if_the_profile_cares() -> None:
    state = TargetState(transports=[{"trtype": "TCP", "max_io_size": 131072}])
    assert plan(ready("malloc", EXPORT="nvmf-tcp"), state, {}).refused == []
    export = {"via": "nvmf-tcp", "bdev": "M0", "nqn": "nqn.2026-11.io.x:y", "max_io_bytes": 1 << 20}
    assert "max_io_size 131072 instead of 1048576" in refusal(made(bdevs=[malloc()], exports=[export]), state)


def test_method_that_the_target_was_built_without_is_refused_by_name() -> None:
    state = TargetState(methods=frozenset({"bdev_malloc_create"}))
    assert refusal(ready("malloc"), state).startswith(
        "vhost_create_blk_controller: this target was built without"
    )


# --- secrets ---


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o700])
def test_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    profile = ready("crypto", KEY_FILE=str(key_file(tmp_path, mode=mode)))
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(profile, tmp_path)


@pytest.mark.parametrize("text", ["", "xyz\n", f"{KEY}\n", f"{KEY}\n{KEY.upper()}\n", "00\n11\n22\n", "é\n"])
def test_key_that_is_none_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    profile = ready("crypto", KEY_FILE=str(key_file(tmp_path, text)))
    with pytest.raises(ConfigError) as caught:
        load_keys(profile, tmp_path)
    assert KEY not in str(caught.value).lower()


def test_missing_key_and_fifo_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the key: No such file"):
        load_keys(ready("crypto", KEY_FILE="gone"), tmp_path)
    with pytest.raises(ConfigError, match="plain file"):
        load_keys(ready("crypto", KEY_FILE="/dev/null"), tmp_path)


def test_keys_are_never_shown(tmp_path: Path) -> None:
    profile = ready("crypto", KEY_FILE=str(key_file(tmp_path)))
    keys = load_keys(profile, tmp_path)
    planned = plan(profile, TargetState(), keys)
    assert planned.calls[0].params["key"] == KEY
    for text in (repr(planned), repr(keys), str(planned.calls[0]), json.dumps(planned.calls[0].shown())):
        assert KEY not in text
        assert KEY2 not in text


def test_other_key_under_the_name_is_refused_and_the_same_kept() -> None:
    profile = ready("crypto")
    mine, other = KeyMaterial(KEY, KEY2), KeyMaterial(KEY2, KEY)
    state = TargetState(keys={"dpurt-key": other.fingerprint})
    assert "another key of this name" in refusal(profile, state, {"dpurt-key": mine})
    assert "key dpurt-key" in plan(profile, state, {"dpurt-key": other}).kept


# --- applying, on the fake and on a real target ---


WITHOUT_HARDWARE = ["malloc", "aio", "uring", "lvol", "raid0", "delay", "error", "throttle"]


@pytest.mark.parametrize("export", ["vhost", "nvmf-tcp"])
@pytest.mark.parametrize("name", WITHOUT_HARDWARE)
async def test_profile_is_applied_once_and_then_is_as_wanted(live: Live, name: str, export: str) -> None:
    profile, keys = on_disk(name, live.run_dir, EXPORT=export, PORT="44231")
    deadline = trio.current_time() + 60
    calls = await apply(live.rpc, profile, keys, deadline)
    assert len(calls) >= len(profile.bdevs)
    planned = await look(live.rpc, profile, keys, deadline)
    assert planned.calls == []
    assert await apply(live.rpc, profile, keys, deadline) == []
    exported = profile.exports[0].bdev
    assert await live.call("bdev_get_bdevs", name=exported)


async def test_other_size_is_refused_before_anything_is_changed(live: Live) -> None:
    deadline = trio.current_time() + 60
    await apply(live.rpc, made(bdevs=[malloc("M1")]), {}, deadline)
    before = await live.call("bdev_get_bdevs")
    with pytest.raises(ProfileRefused, match="M1 exists with num_blocks 256 instead of 128"):
        await apply(live.rpc, made(bdevs=[malloc("M0"), malloc("M1", blocks=128)]), {}, deadline)
    assert await live.call("bdev_get_bdevs") == before


async def test_delay_and_limit_are_changed_on_a_running_target(live: Live) -> None:
    deadline = trio.current_time() + 60
    await apply(live.rpc, *on_disk("delay", live.run_dir), deadline)
    changed = await apply(live.rpc, *on_disk("delay", live.run_dir, READ_US="300000"), deadline)
    assert [call.method for call in changed] == ["bdev_delay_update_latency"] * 2


async def test_call_that_the_target_refuses_is_an_rpc_error_and_the_rest_stays(live: Live) -> None:
    missing = {
        "name": "A",
        "method": "bdev_aio_create",
        "params": {"name": "A", "filename": "/nonexistent/a"},
    }
    with pytest.raises(RpcError, match="bdev_aio_create"):
        await apply(live.rpc, made(bdevs=[malloc(), missing]), {}, trio.current_time() + 60)
    assert await live.call("bdev_get_bdevs", name="M0")


async def test_crypto_profile_on_the_fake(tmp_path: Path) -> None:
    """The real target tested with has no crypto bdev."""
    server = FakeRpcServer(FakeTarget(), tmp_path / "rpc.sock")
    profile, keys = on_disk("crypto", tmp_path)
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        async with open_spdk_rpc(server.path) as rpc:
            deadline = trio.current_time() + 10
            first = await apply(rpc, profile, keys, deadline)
            assert [call.method for call in first] == [
                "accel_crypto_key_create", "bdev_aio_create", "bdev_crypto_create", "vhost_create_blk_controller",
            ]  # fmt: skip
            assert await apply(rpc, profile, keys, deadline) == []
        nursery.cancel_scope.cancel()


async def test_nvme_profile_on_the_fake_and_a_controller_without_bdevs_is_an_error(tmp_path: Path) -> None:
    server = FakeRpcServer(FakeTarget(), tmp_path / "rpc.sock")
    profile = ready("nvme-pcie")
    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        async with open_spdk_rpc(server.path) as rpc:
            deadline = trio.current_time() + 10
            with pytest.raises(RpcError, match="ENODEV"):
                await apply(rpc, profile, {}, deadline)
            server.target.remote_controllers["0000:01:00.0"] = []
            with pytest.raises(RpcError, match="no bdev came of it"):
                await apply(rpc, profile, {}, deadline)
            server.target.restart()
            server.target.remote_controllers["0000:01:00.0"] = [1 << 20]
            await apply(rpc, profile, {}, deadline)
            assert await apply(rpc, profile, {}, deadline) == []
        nursery.cancel_scope.cancel()


async def test_restarted_target_is_brought_back_by_the_hook(tmp_path: Path) -> None:
    profile, keys = on_disk("malloc", tmp_path)
    server = FakeRpcServer(FakeTarget(), tmp_path / "rpc.sock")

    async def reconcile(rpc: Any) -> None:
        await apply(rpc, profile, keys, trio.current_time() + 5)

    async with trio.open_nursery() as nursery:
        await nursery.start(server.run)
        async with open_spdk_rpc(server.path, reconcile):
            for _ in range(3):
                with trio.fail_after(5):
                    await server.target.appeared("Malloc0")
                await server.restart()
            with trio.fail_after(5):
                await server.target.appeared("Malloc0")
        nursery.cancel_scope.cancel()

"""Device profiles by name and from measurements."""

import json

import pytest

from dpurt.bench import device as bench_device
from dpurt.core.device_profiles import DEVICES
from dpurt.errors import ConfigError
from dpurt.replay.measured_device import device_named

PROFILE = {
    "name": "mine",
    "read_latency_s": 1e-4,
    "write_latency_s": 1e-5,
    "read_bytes_per_s": 2e9,
    "write_bytes_per_s": 1e9,
}
FIGURES = {"read latency": 80.0, "write latency": 20.0, "read rate": 3e9, "write rate": 1e9}


def bench_result(figures=FIGURES, name="device"):
    rows = [{"name": n, "value": v, "unit": "x"} for n, v in figures.items()]
    return {"name": name, "conditions": {"queue_depth": 16}, "figures": rows}


def written(tmp_path, value):
    path = tmp_path / "disk.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def test_a_name_of_the_table_is_that_profile():
    assert device_named("xl_flash") is DEVICES["xl_flash"]


def test_a_benchmarks_figures_make_a_profile(tmp_path):
    profile = device_named(written(tmp_path, bench_result()))
    assert (profile.name, profile.queue_depth) == ("disk", 16)
    assert profile.read_latency_s == pytest.approx(80e-6)
    assert (profile.read_bytes_per_s, profile.write_bytes_per_s) == (3e9, 1e9)
    assert profile.source == "measured by dpurt bench device, in disk.json"


def test_fields_of_a_profile_are_one(tmp_path):
    profile = device_named(written(tmp_path, PROFILE))
    assert (profile.name, profile.read_bytes_per_s, profile.source) == ("mine", 2e9, "given in disk.json")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("no json", "malformed"),
        ([], "Expected `object`"),
        (PROFILE | {"read_bytes_per_s": 0}, "bandwidths must be > 0"),
        (PROFILE | {"read_bytes_per_s": "fast"}, "Expected `float`, got `str`"),
        (bench_result(name="bdev"), "got that of 'bdev'"),
        (
            bench_result({n: v for n, v in FIGURES.items() if n != "read rate"}),
            "expected the figures read rate",
        ),
    ],
)
def test_what_is_no_measurement_is_refused(tmp_path, value, problem):
    with pytest.raises(ConfigError, match="expected measurements of a device") as caught:
        device_named(written(tmp_path, value))
    assert problem in caught.value.problem


def test_a_name_that_is_neither_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match=r"expected one of ai_ssd, .*'floppy'"):
        device_named("floppy")


def test_this_machines_file_can_be_measured_and_replayed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = bench_device.run(quick=True)
    profile = device_named(written(tmp_path, result.to_json()))
    assert profile.read_bytes_per_s > 1e6
    assert 0 < profile.read_latency_s < 1
    assert not list(tmp_path.glob("dpurt-bench-*"))

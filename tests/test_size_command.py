"""`dpurt size`: the published figures by command line, and what it says of a trace and a topology."""

import json
from pathlib import Path

import pytest

from dpurt.cli import main

TRACES = Path(__file__).parents[1] / "bench" / "traces"
GIB = 1 << 30


def size(capsys, *arguments):
    assert main(["size", *arguments, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_published_figures_of_llama(capsys):
    answer = size(
        capsys,
        "--model",
        "llama-3-70b",
        "--context",
        "128K",
        "--requests",
        "4",
        "--hit",
        "0.9",
        "--device",
        "ai_ssd",
    )
    assert answer["bytes_per_token"] == 327_680
    assert answer["kv_per_request_gib"] == 40
    assert answer["kv_total_bytes"] == 160 * GIB
    assert answer["window"]["bytes"] == pytest.approx(1.34e9, rel=0.005)
    assert answer["window"]["read_s"] == pytest.approx(0.096, abs=0.0005)
    assert answer["break_even"]["requests_by_context"]["8192"] == 14
    assert answer["break_even"]["requests_by_context"]["32768"] == 4
    assert answer["break_even"]["requests_by_context"]["131072"] == 1
    assert answer["break_even"]["pays"]
    assert answer["reading"]["restore_bytes_per_request"] == pytest.approx(36 * GIB)
    assert answer["gpu"] == {
        "budget_bytes": 108e9,
        "requests": 2,
        "requests_by_context": {
            "8192": 40, "32768": 10, "131072": 2, "262144": 1, "524288": 0, "1048576": 0
        },
    }  # fmt: skip
    assert any("95.9 ms" in remark for remark in answer["remarks"])


def test_the_b300_table_is_there_with_its_budget(capsys):
    arguments = ("--model", "deepseek-v4-pro", "--gpu-budget-gb", "107.374")  # 100 GiB
    for precision, expected in (("bf16", [82, 41, 20, 9]), ("fp8", [164, 82, 41, 20])):
        answer = size(capsys, *arguments, "--precision", precision)
        table = list(answer["gpu"]["requests_by_context"].values())
        assert table[2:] == pytest.approx(expected, abs=1)
        assert answer["gpu"]["budget_bytes"] == pytest.approx(100 * GIB, rel=1e-4)


def test_bandwidth_replaces_the_devices(capsys):
    fast, slow = (
        size(capsys, "--model", "deepseek-v3", "--bandwidth", rate)["window"]["read_s"]
        for rate in ("14G", "7G")
    )
    assert slow == pytest.approx(2 * fast, rel=0.01)


def test_a_traces_curve_and_knee(capsys):
    answer = size(capsys, "--model", "llama-3-70b", "--trace", str(TRACES / "ragpulse_600.jsonl.gz"))
    curve, knee = answer["trace"]["curve"], answer["trace"]["knee"]
    assert answer["trace"]["format"] == "ragpulse"
    assert [point["hit_rate"] for point in curve] == sorted(point["hit_rate"] for point in curve)
    assert knee["hit_rate"] in [point["hit_rate"] for point in curve]
    assert curve[-1]["bytes"] == curve[-1]["blocks"] * 512 * 327_680


def test_whether_a_topologys_node_holds_the_load(capsys):
    small = size(capsys, "--model", "smollm2-135m", "--context", "8K", "--topology", "laptop")["topology"]
    large = size(capsys, "--model", "llama-3-70b", "--requests", "1000", "--topology", "laptop")["topology"]
    assert small["staging_holds_windows"]
    assert not large["staging_holds_windows"]
    assert not large["flash_holds_load"]
    assert small["staging_bytes"] == large["staging_bytes"] > 0


def test_whether_a_cards_envelope_carries_the_load(capsys):
    arguments = ("--model", "llama-3-70b", "--topology", "bluefield3", "--hit", "0.9")
    one, many = (
        size(capsys, *arguments, "--context", "8K", "--requests", n)["topology"]["envelope"]
        for n in ("1", "64")
    )
    assert one["dram_holds_staging"]
    assert (one["link_carries_load"], one["devices_carry_load"]) == ([True, True], [True, True])
    assert many["wanted_bytes_per_s"] == pytest.approx([64 * rate for rate in one["wanted_bytes_per_s"]])
    assert many["devices_carry_load"][1] is False
    assert one["source"]


def test_rates_are_also_said_per_gpu(capsys):
    arguments = ("--model", "llama-3-70b", "--requests", "32")
    one, eight = (size(capsys, *arguments, "--gpus", n)["reading"] for n in ("1", "8"))
    assert [8 * rate for rate in eight["bytes_per_s_per_gpu"]] == pytest.approx(one["bytes_per_s_per_gpu"])


def test_text_has_every_part_for_people(capsys):
    assert main(["size", "--model", "glm-5.2"]) == 0
    text = capsys.readouterr().out
    for part in (
        "327,680",
        "42.95 GB (40.00 GiB)",
        "14.00 GB/s",
        "break_even",
        "tier hbm",
        "article's break-even row",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--hit", "1.5"], "expected a fraction"),
        (["--context", "1G"], "expected tokens such as"),
        (["--model", "gpt-2"], "invalid choice"),
    ],
)
def test_senseless_arguments_are_refused(capsys, arguments, problem):
    with pytest.raises(SystemExit) as caught:
        main(["size", "--model", "llama-3-70b", *arguments])
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--device", "floppy"], "floppy"),
        (["--gpu-budget-gb", "0"], "more than 0"),
        (["--trace", "none"], "none"),
    ],
)
def test_what_cannot_be_sized_is_named(capsys, arguments, problem):
    assert main(["size", "--model", "llama-3-70b", *arguments]) == 2
    assert problem in capsys.readouterr().err

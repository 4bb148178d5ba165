"""`dpurt spdk up | status | down`: bring an SPDK target to a profile, look at it, stop it.

`up` attaches to a target that answers, or starts one; then it makes only what is missing, so it may be run again at any time.
`--dry-run` shows the calls and makes none. `down` stops a target that `up` started, and no other. Keys are
never shown.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import trio

from dpurt.bdev.spdk_apply import ProfileRefused, apply, load_keys, load_profile, look
from dpurt.bdev.spdk_plan import Call, Plan, plan
from dpurt.bdev.spdk_process import Lack, OwnTarget, TargetFailed, has_huge_pages, lacks, start_target
from dpurt.bdev.spdk_profile import KeyMaterial, Profile
from dpurt.bdev.spdk_rpc import SpdkRpc, open_spdk_rpc
from dpurt.bdev.spdk_state import TargetState
from dpurt.bdev.spdk_status import BdevStatus, TargetStatus, read_status
from dpurt.config.schema import NodeConfig
from dpurt.errors import ConfigError, TargetUnavailable
from dpurt.json_output import add_json_argument, write_json

PROFILES = Path(__file__).parent.parent / "spdk"
BUDGET_S = 60.0
PROBE_S = 3.0
STOP_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    up = actions.add_parser("up", help="attach to a target or start one, and apply a profile")
    up.add_argument("profile", help=f"a JSON file, or one of: {', '.join(ready_profiles())}")
    up.add_argument(
        "--set", metavar="VAR=VALUE", action="append", default=[], help="a variable of the profile"
    )
    up.add_argument("--target", metavar="BINARY", default=os.environ.get("DPURT_SPDK_TGT"),
                    help="the spdk_tgt to start if none answers (default: $DPURT_SPDK_TGT)")  # fmt: skip
    up.add_argument(
        "--cpumask", default="0x1", help="cores of a target that is started; each burns (default: 0x1)"
    )
    up.add_argument("--dry-run", action="store_true", help="show the calls, make none, start nothing")
    up.set_defaults(action=_up)
    status = actions.add_parser("status", help="version, bdevs, exports, I/O, health, reactors")
    status.add_argument(
        "--interval", type=float, default=0.5, help="seconds to watch the reactors (default: 0.5)"
    )
    status.set_defaults(action=_status)
    down = actions.add_parser("down", help="stop a target that up started")
    down.set_defaults(action=_down)
    for action in (up, status, down):
        action.add_argument(
            "--rpc", type=Path, metavar="PATH", help="the target's socket (default: in the run folder)"
        )
        action.add_argument(
            "--run-dir", type=Path, metavar="DIR", help="for socket, log and pid file of our own target"
        )
        add_json_argument(action)


def run(args: argparse.Namespace) -> int:
    """Carry out the chosen action."""
    return int(trio.run(args.action, args))


def ready_profiles() -> list[str]:
    """Names that `up` takes beside paths."""
    return sorted(path.stem for path in PROFILES.glob("*.json"))


# --- up ---


@dataclass(frozen=True, slots=True)
class _Wanted:
    profile: Profile
    keys: dict[str, KeyMaterial]


async def _up(args: argparse.Namespace) -> int:
    wanted = _wanted(args.profile, args.set)
    own = OwnTarget(_run_dir(args))
    path = _rpc_path(args, own)
    down_because = await _why_down(path)
    if args.dry_run:
        return await _show_plan(args, wanted, path, down_because)
    started = await _start(args, own, wanted.profile, path, down_because) if down_because else None
    _say(args, f"started spdk_tgt, pid {started}, log {own.log_path}" if started else f"attached to {path}")
    async with open_spdk_rpc(path) as rpc:
        return await _bring_up(args, rpc, wanted)


def _wanted(name: str, settings: Sequence[str]) -> _Wanted:
    path = PROFILES / f"{name}.json" if name in ready_profiles() else Path(name)
    if not path.is_file():
        raise ConfigError(name, f"no such profile; ready ones: {', '.join(ready_profiles())}")
    profile = load_profile(path, _settings(settings))
    return _Wanted(profile, load_keys(profile, Path.cwd()))


def _settings(words: Sequence[str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name or name in settings:
            raise ConfigError("--set", f"expected VAR=VALUE, each variable once, got {word!r}")
        settings[name] = value
    return settings


def _run_dir(args: argparse.Namespace) -> Path:
    """A private folder, as nodes have theirs; its own checks refuse what others could tamper with."""
    given = None if args.run_dir is None else str(args.run_dir.absolute())
    return NodeConfig(name="spdk", run_dir=given).make_run_dir()


def _rpc_path(args: argparse.Namespace, own: OwnTarget) -> Path:
    return args.rpc.absolute() if args.rpc is not None else own.run_dir / "spdk.sock"


async def _why_down(path: Path) -> str:
    """Why no target answers there; empty if one does. A target that is there but silent is an error."""
    async with open_spdk_rpc(path) as rpc:
        try:
            await rpc.call("spdk_get_version", deadline=trio.current_time() + PROBE_S)
        except TargetUnavailable as error:
            if "permission" in error.why:
                raise
            return error.why
    return ""


async def _start(args: argparse.Namespace, own: OwnTarget, profile: Profile, path: Path, why: str) -> int:
    missing = lacks(args.target, profile.needs_pci)
    if missing:
        raise TargetFailed(f"no target answers at {path} ({why}), and none can be started", _told(missing))
    if own.pid() is not None:
        raise TargetFailed(
            str(args.target), f"our target, pid {own.pid()}, runs but does not answer at {path}"
        )
    return await start_target(
        own, args.target, path, cpumask=args.cpumask, use_huge=has_huge_pages(), budget_s=BUDGET_S
    )


def _told(missing: Sequence[Lack]) -> str:
    return "; ".join(f"{lack.what} -> {lack.fix}" for lack in missing)


async def _show_plan(args: argparse.Namespace, wanted: _Wanted, path: Path, why: str) -> int:
    deadline = trio.current_time() + BUDGET_S
    if why:
        _say(args, f"no target answers at {path} ({why}); this is for a new one")
        for lack in lacks(args.target, wanted.profile.needs_pci):
            _say(args, f"missing: {lack.what} -> {lack.fix}")
        planned = plan(wanted.profile, TargetState(), wanted.keys)
        if planned.refused:
            raise ProfileRefused(planned.refused)
    else:
        async with open_spdk_rpc(path) as rpc:
            planned = await look(rpc, wanted.profile, wanted.keys, deadline)
    for call in planned.calls:
        _say(args, f"would call {call!r}")
    return _finish(args, planned, [], is_started=bool(why))


async def _bring_up(args: argparse.Namespace, rpc: SpdkRpc, wanted: _Wanted) -> int:
    deadline = trio.current_time() + BUDGET_S
    made = await apply(
        rpc, wanted.profile, wanted.keys, deadline, report=lambda call: _say(args, f"called {call!r}")
    )
    planned = await look(rpc, wanted.profile, wanted.keys, deadline)
    return _finish(args, planned, made, is_started=False)


def _finish(args: argparse.Namespace, planned: Plan, made: Sequence[Call], *, is_started: bool) -> int:
    for name in planned.kept:
        _say(args, f"as wanted: {name}")
    if args.json is not None:
        shown = {
            "planned": [call.shown() for call in planned.calls],
            "called": [call.shown() for call in made],
            "as_wanted": planned.kept,
            "new_target": is_started,
        }
        write_json(args.json, shown)
    return 0


def _say(args: argparse.Namespace, text: str) -> None:
    if args.json is None:
        print(text, flush=True)


# --- status and down ---


async def _status(args: argparse.Namespace) -> int:
    path = _rpc_path(args, OwnTarget(_run_dir(args)))
    async with open_spdk_rpc(path) as rpc:
        status = await read_status(rpc, args.interval, trio.current_time() + BUDGET_S + args.interval)
    if args.json is not None:
        write_json(args.json, asdict(status))
    else:
        print("\n".join(lines(status)))
    return 0


def lines(status: TargetStatus) -> list[str]:
    """The status as text."""
    busy = ", ".join(f"core {core} {share:.0%} busy" for core, share in status.reactors.items())
    shown = [f"{status.version}; {busy}"]
    for bdev in status.bdevs:
        shown += _bdev_lines(bdev)
    for name, health in status.health.items():
        celsius = "unknown" if health.temperature_celsius is None else f"{health.temperature_celsius} °C"
        shown.append(
            f"{name}: {health.model}, {health.percentage_used} % used, {health.bytes_written / 1e9:,.1f} GB written, "
            f"temperature {celsius}, {'healthy' if health.is_healthy else 'NOT healthy'}"
        )
    return shown


def _bdev_lines(bdev: BdevStatus) -> list[str]:
    size = f"{bdev.size_bytes / (1 << 20):,.0f} MiB of {bdev.block_size} B"
    counters = (
        f"{bdev.reads:,} reads ({bdev.bytes_read:,} B), {bdev.writes:,} writes ({bdev.bytes_written:,} B)"
    )
    errors = f", {bdev.io_errors} I/O errors" if bdev.io_errors else ""
    return [f"{bdev.name}: {bdev.kind}, {size}; {counters}{errors}", *(f"  {way}" for way in bdev.exports)]


async def _down(args: argparse.Namespace) -> int:
    own = OwnTarget(_run_dir(args))
    pid = own.pid()
    is_stopped = await own.stop(STOP_S)
    if not is_stopped and not await _why_down(_rpc_path(args, own)):
        why = "answers, but dpurt did not start it; stop it the way it was started"
        raise TargetFailed(f"the target at {_rpc_path(args, own)}", why)
    _say(args, f"stopped spdk_tgt, pid {pid}" if is_stopped else "no target of ours is running")
    if args.json is not None:
        write_json(args.json, {"stopped": pid if is_stopped else None})
    return 0

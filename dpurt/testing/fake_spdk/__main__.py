"""`python -m dpurt.testing.fake_spdk -r SOCKET -S DIR`: the fake as a process, called as an `spdk_tgt` is.

Serves RPC until SIGTERM; then it removes its socket and ends with 0, as a real one does.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

import trio

from dpurt.testing.fake_spdk.rpc_server import FakeRpcServer
from dpurt.testing.fake_spdk.state import FakeTarget


async def serve(path: Path, vhost_dir: str) -> None:
    server = FakeRpcServer(FakeTarget(vhost_dir=vhost_dir), path)
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.run)
            await anext(signals)
            nursery.cancel_scope.cancel()


def main() -> None:
    parser = argparse.ArgumentParser("fake_spdk")
    parser.add_argument("-r", type=Path, required=True)
    parser.add_argument("-S", default="/var/tmp")
    parser.add_argument("-m", default="0x1")
    parser.add_argument("-s", type=int, default=0)
    parser.add_argument("--no-huge", action="store_true")
    args = parser.parse_args()
    trio.run(serve, args.r, args.S)
    args.r.unlink(missing_ok=True)


if __name__ == "__main__":
    main()

"""A host that will come to a bad end: ``python doomed_host.py RUN_DIR ENDPOINT FABRIC hold|store``.

``hold``: leases blocks 1 to 4 of the test's prompt (views, over shm), reserves two others and writes half of one, says
``ready``; then obeys lines: ``check`` prints a digest of what it holds, ``bye`` lets go and ends.
``store``: stores new chains as fast as it can, for ever.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from pathlib import Path

import trio

from dpurt.client import connect
from dpurt.config import Config
from dpurt.demo.content import payload_of, tokens_of
from dpurt.fabric import Piece
from dpurt.testing.node import BLOCK_TOKENS, small_config, spaces_of
from dpurt.testing.raw_host import RawHost, link_of, raw_host
from dpurt.wire import messages as m

PAYLOAD = 4 * 4096


async def hold(config: Config, endpoint: str, fabric: str) -> None:
    """Take all a request can take, then wait, alive."""
    async with raw_host(endpoint) as raw, trio.open_nursery() as nursery:
        link = await link_of(await raw.hello(config, "host-a", [fabric]))
        await raw.ask(m.Lookup(space="s", request="r", tokens=tokens_of([1, 2, 3, 4], BLOCK_TOKENS)))
        load = await raw.ask(m.Load(request="r", first=0, count=4))
        assert isinstance(load, m.LoadReply)
        views = [link.view(g.region, g.offset, g.length) for g in load.blocks]
        prompt = tokens_of([50, 51], BLOCK_TOKENS)
        reserve = await raw.ask(m.Reserve(space="s", request="w", first=0, count=2, tokens=prompt))
        assert isinstance(reserve, m.ReserveReply)
        room, half = reserve.blocks[0], memoryview(bytes(PAYLOAD // 2))
        await link.store([Piece(room.region, room.offset, room.reservation, half)], trio.current_time() + 5)
        nursery.start_soon(stay_alive, raw)
        print("ready", flush=True)
        await obey([view for view in views if view is not None])
        await link.aclose()
        nursery.cancel_scope.cancel()


async def stay_alive(raw: RawHost) -> None:
    while True:
        await raw.send(m.encode(m.Ping()))
        await trio.sleep(0.2)


async def obey(views: list[memoryview]) -> None:
    """Lines from the test, until it says ``bye``."""
    while (line := (await trio.to_thread.run_sync(sys.stdin.readline)).strip()) == "check":
        print(hashlib.blake2b(b"".join(views), digest_size=16).hexdigest(), flush=True)
    assert line == "bye"
    for view in views:
        view.release()


async def store(config: Config, endpoint: str, fabric: str) -> None:
    """Store for ever."""
    async with connect(endpoint, host="host-a", spaces=spaces_of(config), fabrics=[fabric]) as client:
        print("ready", flush=True)
        for number in itertools.count():
            blocks = [1000 + 4 * number + i for i in range(4)]
            payloads = [payload_of(block.to_bytes(16, "little"), PAYLOAD) for block in blocks]
            await client.store("s", f"w{number}", tokens_of(blocks, BLOCK_TOKENS), 0, payloads)


if __name__ == "__main__":
    run_dir, the_endpoint, the_fabric, mode = sys.argv[1:]
    trio.run(hold if mode == "hold" else store, small_config(Path(run_dir)), the_endpoint, the_fabric)

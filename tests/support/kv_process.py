"""One side of a handover as a process of its own, which stops at a given stage and waits there to be killed.

``python kv_process.py give|take TRANSPORT STAGE [PORT]``. A receiver prints its port first. At its stage each side
prints "there" and does nothing more; with the stage "end" it completes the handover and prints "done".
"""

import asyncio
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # it runs as a script

from support.kv_pages import Pages

from parley.disagg.kv.peer import Peer
from parley.disagg.kv.receiver import Taker

SECRET = b"of the cluster, for tests"
PAGES = 300  # of 64 KiB: more than socket buffers hold
SIZES = (32 << 10, 32 << 10)


async def at(stage: str) -> None:
    if stage == sys.argv[3]:
        print("there", flush=True)
        await asyncio.Event().wait()


async def give(peer: Peer, port: int) -> None:
    pages = Pages(PAGES, SIZES, seed=7)
    peer.add("demo", pages.arena)
    order = list(range(PAGES))[::-1]
    giver = await peer.connect(f"127.0.0.1:{port}", "demo")
    await at("linked")
    await giver.begin(b"body", 1)
    await at("begun")
    giver.filled(0, order[: PAGES // 2])
    await at("half")
    giver.filled(0, order[PAGES // 2 :])
    await giver.give(b"given")
    await at("given")
    await giver.done()
    print("done", giver.bytes, zlib.crc32(b"".join(map(pages.page, order))), flush=True)
    await at("over")


async def take(peer: Peer) -> None:
    pages = Pages(PAGES, SIZES)
    peer.add("demo", pages.arena)
    over = asyncio.Event()

    async def accept(taker: Taker) -> None:
        await at("offered")
        own = list(range(PAGES))
        await taker.accept([(0, own)])
        await at("accepted")
        await taker.given()
        await at("given")
        await taker.settled()
        print("done", taker.bytes, zlib.crc32(b"".join(map(pages.page, own))), flush=True)
        over.set()

    await peer.listen("127.0.0.1", 0, accept)
    print(peer.port, flush=True)
    await at("linked")
    await over.wait()


async def main() -> None:
    peer = Peer(secret=SECRET, shared=sys.argv[2] == "shared")
    if sys.argv[1] == "give":
        await give(peer, int(sys.argv[4]))
    else:
        await take(peer)
    await peer.close()


if __name__ == "__main__":
    asyncio.run(main())

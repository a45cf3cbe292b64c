"""One side of a handover as a process of its own, which stops at a given stage and waits there to be killed.

``python kv_process.py give|take TRANSPORT STAGE [PORT]``. A receiver prints its port first. At its stage each side
prints "there" and does nothing more; with the stage "end" it completes the handover and prints "done".
"""

import asyncio
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # it runs as a script

from support.kv_pages import PageMemory

from parley.disagg.kv.peer import KVPeer
from parley.disagg.kv.receiver import KVReceiver

SECRET = b"of the cluster, for tests"
PAGES = 300  # of 64 KiB: more than socket buffers hold
SIZES = (32 << 10, 32 << 10)


async def stop_at(stage: str) -> None:
    if stage == sys.argv[3]:
        print("there", flush=True)
        await asyncio.Event().wait()


async def run_sender(peer: KVPeer, port: int) -> None:
    pages = PageMemory(PAGES, SIZES, seed=7)
    peer.add_arena("demo", pages.arena)
    page_order = list(range(PAGES))[::-1]
    sender = await peer.open_handover(f"127.0.0.1:{port}", "demo")
    await stop_at("linked")
    await sender.begin_handover(b"body", 1)
    await stop_at("begun")
    sender.add_computed_pages(0, page_order[: PAGES // 2])
    await stop_at("half")
    sender.add_computed_pages(0, page_order[PAGES // 2 :])
    await sender.send_outputs(b"given")
    await stop_at("given")
    await sender.finish_handover()
    print("done", sender.sent_bytes, zlib.crc32(b"".join(map(pages.read_page, page_order))), flush=True)
    await stop_at("over")


async def run_receiver(peer: KVPeer) -> None:
    pages = PageMemory(PAGES, SIZES)
    peer.add_arena("demo", pages.arena)
    finished = asyncio.Event()

    async def accept(receiver: KVReceiver) -> None:
        await stop_at("offered")
        own_pages = list(range(PAGES))
        await receiver.accept_handover([(0, own_pages)])
        await stop_at("accepted")
        await receiver.wait_outputs()
        await stop_at("given")
        await receiver.wait_settled()
        print("done", receiver.received_bytes, zlib.crc32(b"".join(map(pages.read_page, own_pages))), flush=True)
        finished.set()

    await peer.listen("127.0.0.1", 0, accept)
    print(peer.port, flush=True)
    await stop_at("linked")
    await finished.wait()


async def main() -> None:
    peer = KVPeer(secret=SECRET, shared=sys.argv[2] == "shared")
    if sys.argv[1] == "give":
        await run_sender(peer, int(sys.argv[4]))
    else:
        await run_receiver(peer)
    await peer.close_peer()


if __name__ == "__main__":
    asyncio.run(main())

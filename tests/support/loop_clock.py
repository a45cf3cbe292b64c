"""Time that passes at once in the test's event loop.

A time limit that a test wants to see exceeded can so be longer than the slowest machine needs to reach it.
"""

import asyncio


async def pass_time(seconds: float) -> None:
    """Handle what has arrived so far, then set the clock of the running loop forward by ``seconds``.

    Timers that become due have run when this returns. The loop must be asyncio's own.
    """
    for _ in range(5):  # what was sent is read in the next turn, and handled by tasks in the turns after it
        await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    earlier_clock = loop.time
    loop.time = lambda: earlier_clock() + seconds  # type: ignore[method-assign]
    for _ in range(2):
        await asyncio.sleep(0)

"""Several async generators as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

_Item = TypeVar("_Item")


async def merged(
    sources: Sequence[AsyncGenerator[_Item, None]],
) -> AsyncGenerator[tuple[int, _Item], None]:
    """(number of the source, item), in the order in which they come.

    What one raises ends all. However it ends, all sources are closed. Items wait here for whoever
    is slow to take them.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as source:
            async for item in source:
                yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, _Item] | Exception | None] = asyncio.Queue()
    pumps = [
        asyncio.create_task(_pump(number, source, arrived)) for number, source in enumerate(sources)
    ]
    try:
        running = len(pumps)
        while running:
            found = await arrived.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                running -= 1
            else:
                yield found
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    number: int,
    source: AsyncGenerator[_Item, None],
    arrived: "asyncio.Queue[tuple[int, _Item] | Exception | None]",
) -> None:
    end = None
    try:
        async with aclosing(source):
            async for item in source:
                arrived.put_nowait((number, item))
    except Exception as error:
        end = error
    arrived.put_nowait(end)

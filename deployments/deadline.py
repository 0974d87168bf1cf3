"""Answers that must be complete in time."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from deployments import errors

_Item = TypeVar("_Item")


async def within(
    seconds: float, source: AsyncGenerator[_Item, None]
) -> AsyncGenerator[_Item, None]:
    """What the source yields until then. However it ends, the source is closed.

    Raises:
        ApiError: it is late, a 504.
    """
    clock = asyncio.get_running_loop()
    deadline = clock.time() + seconds
    async with aclosing(source):
        while True:
            try:
                item = await asyncio.wait_for(anext(source), deadline - clock.time())
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise errors.late(seconds) from None
            yield item

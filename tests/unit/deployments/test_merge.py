"""Several generators as one: nothing lost, nothing left open."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from deployments.merge import merged


class Source:
    """Gives 0, 1, 2, ... up to `size`, then ends or fails; knows whether it was closed."""

    def __init__(self, size: int, error: Exception | None = None) -> None:
        self._size = size
        self._error = error
        self.open = True

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for item in range(self._size):
                await asyncio.sleep(0)
                yield item
            if self._error:
                raise self._error
        finally:
            self.open = False


@pytest.mark.parametrize("sizes", [[3], [0], [4, 0, 2], [1, 1, 1, 1]])
async def test_every_item_comes_once_and_in_its_sources_order(sizes: list[int]) -> None:
    sources = [Source(size) for size in sizes]
    heard = [pair async for pair in merged([source.items() for source in sources])]
    for number, size in enumerate(sizes):
        assert [item for source, item in heard if source == number] == [*range(size)]
    assert not any(source.open for source in sources)


@pytest.mark.parametrize("others", [0, 2])
async def test_what_one_raises_ends_all(others: int) -> None:
    failing = Source(2, ValueError("no"))
    endless = [Source(10**9) for _ in range(others)]
    with pytest.raises(ValueError, match="no"):
        async for _ in merged([source.items() for source in (failing, *endless)]):
            pass
    assert not any(source.open for source in (failing, *endless))


@pytest.mark.parametrize("count", [1, 3])
async def test_whoever_stops_listening_closes_all(count: int) -> None:
    sources = [Source(10**9) for _ in range(count)]
    async with aclosing(merged([source.items() for source in sources])) as items:
        for _ in range(5):
            await anext(items)
    assert not any(source.open for source in sources)

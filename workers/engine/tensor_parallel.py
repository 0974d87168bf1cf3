"""The ranks of a tensor-parallel target: rank 0 decides, the others do the same in lock step.

Rank 0 sends every command to all ranks over a gloo group; the collectives inside the model then
meet in the same order everywhere. One lost rank breaks the set: it is restarted as one.
"""

from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from workers.engine.pack import Pack
from workers.engine.runner import Runner

_Slots = tuple[int, ...]
Command = (
    tuple[Literal["forward"], Pack]
    | tuple[Literal["move"], _Slots, _Slots]
    | tuple[Literal["swap"], _Slots, _Slots, int, bool]
)

# Followers wait inside a collective for the next request, which may be days away.
_PATIENCE = timedelta(days=365)


class RankGroup:
    """Rank `rank` of `size`, after `join`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        # Commands are Python objects on the CPU, whatever carries the tensors.
        self._commands = dist.new_group(backend="gloo", timeout=_PATIENCE)

    @classmethod
    def join(
        cls, rank: int, size: int, address: str, port: int, device: torch.device
    ) -> "RankGroup":
        """Meet the other ranks; blocks until all are there."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=size,
        )
        return cls(rank)

    def send(self, command: Command | None) -> None:
        """Rank 0: hand a command to every other rank; None ends them."""
        dist.broadcast_object_list([command], src=0, group=self._commands)

    def follow(self, runner: Runner) -> None:
        """The other ranks: obey until told to end."""
        while (command := self._receive()) is not None:
            if command[0] == "forward":
                runner.forward(command[1])
            elif command[0] == "move":
                runner.store.move(command[1], command[2])
            else:
                _, pages, places, page_size, back = command
                runner.store.swap(pages, places, page_size, back=back)

    def _receive(self) -> Command | None:
        box: list[Command | None] = [None]
        dist.broadcast_object_list(box, src=0, group=self._commands)
        return box[0]

    def leave(self) -> None:
        dist.destroy_process_group()

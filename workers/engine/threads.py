"""torch's own team of threads, for code of ours: a second team would fight it for the cores."""

import ctypes
from pathlib import Path
from typing import Any

import torch

_WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def share(worker: int, work: int) -> None:
    """Call the C function at an address once in each of torch's threads, with an address of what
    they are to share among themselves; return when all have returned. Where torch's threads are not
    to be had, the caller's alone does it all.
    """
    if _parallel is None:
        _WORKER(worker)(work)
    else:
        _parallel(worker, work, torch.get_num_threads(), 0)


def barrier_address() -> int:
    """Of a C function that waits until all of a team have called it; 0 where there is no team."""
    return _barrier


def _open_team() -> tuple[Any, int]:
    """What compilers put in place of `#pragma omp parallel` and `barrier`, of torch's library."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        library = ctypes.CDLL(str(path))
        parallel, barrier = library.GOMP_parallel, library.GOMP_barrier
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel, ctypes.cast(barrier, ctypes.c_void_p).value or 0
    return None, 0


_parallel, _barrier = _open_team()

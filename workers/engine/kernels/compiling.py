"""Compiling kernels at their first call, and keeping the code on the disk.

numba keeps it until the file of a function changes. But a kernel's code holds that of all it calls,
in whatever files: it would go on as it was. So here the code is kept until any kernel's source
changes.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from numba import njit, types
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.ccallback import CFunc

_Function = TypeVar("_Function", bound=Callable[..., Any])

_FOLDER = Path(__file__).parent
# The kernels, and where else they have constants from.
_SOURCES = (
    *sorted(_FOLDER.glob("*.py")),
    _FOLDER.parent / "packed_weight.py",
    _FOLDER.parents[1] / "speculation" / "noise.py",
)
_C_SIGNATURE = types.void(types.voidptr)


@cache
def _stamp() -> str:
    digest = hashlib.sha256()
    for source in _SOURCES:
        digest.update(source.read_bytes())
    return digest.hexdigest()


class _CodeCache(CompileResultCacheImpl):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        self._locator.get_source_stamp = _stamp


class _KernelCache(FunctionCache):
    _impl_class = _CodeCache


def compiled(*freedoms: str, inlined: bool = False) -> Callable[[_Function], _Function]:
    """freedoms: what LLVM may do to float operations, by its own names; NaN and infinity keep their
    sense in any case.

    inlined: part of its callers from the start, with their freedoms. LLVM optimises a function with
    all that it calls, over again for each of its callers' callers: a step that one place calls is
    best so. (A float32 Llama is loaded and compiled in 22 s instead of 31.)
    """
    inline: Literal["always", "never"] = "always" if inlined else "never"

    def compiler(function: _Function) -> _Function:
        dispatcher: Any = njit(fastmath=set(freedoms), error_model="numpy", inline=inline)(function)
        dispatcher._cache = _KernelCache(function)  # type: ignore[no-untyped-call]
        return cast(_Function, dispatcher)

    return compiler


def c_function(function: Callable[[Any], None]) -> int:
    """Compiled now: the address of a C function that takes one address."""
    worker: Any = CFunc(function, (_C_SIGNATURE.args, _C_SIGNATURE.return_type), {}, {})
    worker._cache = _KernelCache(function)  # type: ignore[no-untyped-call]
    worker.compile()
    return int(worker.address)

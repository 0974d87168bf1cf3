"""The configuration file: wrong keys are named, defaults run, the environment has the last word."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import SecretStr, ValidationError

from deployments.config import DEFAULT, DraftConfig, OutriderConfig, explain, load_config
from workers.draft import DraftSpec

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_REDIS_URL", raising=False)
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_without_a_file_the_shipped_pool_is_served() -> None:
    config = load_config()
    assert config == DEFAULT
    assert [draft.name for draft in config.pool] == ["code", "math", "en", "zh", "lm"]
    assert config.pool[4].spec() == DraftSpec("lm", "lm", layers=(0, 1, 28, 29))
    assert config.pool[0].spec() == DraftSpec(
        "code", "hybrid", path=str(ROOT / "drafts" / "code"), domain="code"
    )


def test_another_target_has_no_pool_of_its_own(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "target: {model: some/model}")).pool == ()


def test_the_shipped_pool_can_be_switched_off(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "drafts: []")).pool == ()


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("targets: {}", "targets"),
        ("target: {modle: x}", "target.modle"),
        ("drafts: [{name: a, kind: ngram, pth: x}]", "drafts.0.pth"),
        ("router: {redis: x}", "router.redis"),
        ("limits: {max_runing: 1}", "limits.max_runing"),
        ("speculation: {gamma: 1}", "speculation.gamma"),
        ("http: {prot: 1}", "http.prot"),
    ],
)
def test_an_unknown_key_is_named_by_its_path(tmp_path: Path, text: str, path: str) -> None:
    with pytest.raises(ValueError, match="unknown key") as caught:
        load_config(write(tmp_path, text))
    assert f"{path}: unknown key" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("target: {dtype: int4}", "target.dtype: Input should be 'float32'"),
        ("target: {device: tpu}", "target.device"),
        ("target: {kv_tokens: 0}", "target.kv_tokens"),
        ("drafts: [{name: auto, kind: ngram}]", "a draft cannot be called 'auto'"),
        ("drafts: [{name: 'a b', kind: ngram}]", "drafts.0.name"),
        ("drafts: [{name: a, kind: ngram}, {name: a, kind: ngram}]", "two drafts are called 'a'"),
        ("drafts: [{name: a, kind: lm}]", "needs either path or layers"),
        ("drafts: [{name: a, kind: ngram, layers: [1]}]", "layers are for lm drafts"),
        (
            "drafts: [{name: a, kind: ngram, domain: law}]",
            "drafts.0.domain: Input should be 'code'",
        ),
        ("router: {threshold: .inf}", "router.threshold"),
        ("speculation: {budget: 9, max_budget: 8}", "budget 9 is larger than max_budget 8"),
        ("http: {port: 0}", "http.port"),
        ("[1, 2]", "expected keys"),
        ("a: [", "is not YAML"),
        ("applications: []", "serve run"),
    ],
)
def test_a_wrong_value_is_explained(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match="config.yaml") as caught:
        load_config(write(tmp_path, text))
    assert says in str(caught.value)


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        OutriderConfig.model_validate({"a": 1, "http": {"port": "x"}})
    lines = explain(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["http.port", "a"]


def test_a_missing_file_is_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        load_config(tmp_path / "none.yaml")


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# nothing\n")) == DEFAULT


def test_the_environment_says_where_redis_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "router: {redis_url: 'redis://file'}")
    assert load_config(file).router.redis_url == "redis://file"
    monkeypatch.setenv("OUTRIDER_REDIS_URL", "redis://environment")
    assert load_config(file).router.redis_url == "redis://environment"
    assert load_config().router.redis_url == "redis://environment"


def test_the_environment_has_the_key_and_nothing_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "api: {key: from the file}")
    assert load_config(file).api.key == SecretStr("from the file")
    monkeypatch.setenv("OUTRIDER_API_KEY", "from the environment")
    for config in (load_config(file), load_config()):
        assert config.api.key == SecretStr("from the environment")
        assert "environment" not in f"{config} {config!r}"


def test_paths_survive_a_change_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "table").mkdir()
    monkeypatch.chdir(tmp_path)
    drafts = "drafts: [{name: t, kind: ngram, path: table}]"
    config = load_config(write(tmp_path, f"target: {{model: ./model}}\n{drafts}"))
    assert config.target.model == str(tmp_path / "model")
    assert config.target.served_name == "model"
    assert config.pool[0].path == str(tmp_path / "table")


def shipped(name: str) -> Any:
    return yaml.safe_load((ROOT / "deployments" / name).read_text())


def test_the_example_file_shows_every_key_and_is_valid() -> None:
    example = shipped("config.example.yaml")
    config = OutriderConfig.model_validate(example)
    for name, section in OutriderConfig.model_fields.items():
        assert name in example, name
        if name != "drafts":
            fields = type(getattr(config, name)).model_fields
            assert fields.keys() == example[name].keys(), name
            assert section.default == getattr(config, name), f"{name}: not the default"
    assert config == DEFAULT


def test_the_pool_in_the_example_is_the_default_pool() -> None:
    text = (ROOT / "deployments" / "config.example.yaml").read_text()
    shown = [line.removeprefix("#") for line in text.splitlines() if line.startswith("#  - ")]
    config = OutriderConfig.model_validate({"drafts": yaml.safe_load("\n".join(shown))})
    assert [draft.spec().name for draft in config.pool] == [d.name for d in DEFAULT.pool]
    assert config.pool[4] == DEFAULT.pool[4]
    for shown_draft, draft in zip(config.pool[:4], DEFAULT.pool[:4], strict=True):
        assert (ROOT / str(shown_draft.path)).resolve() == Path(str(draft.path))
        assert (shown_draft.domain, shown_draft.kind) == (draft.domain, draft.kind)


def test_the_serve_file_names_the_builder_and_valid_arguments() -> None:
    (application,) = shipped("serve.example.yaml")["applications"]
    assert application["import_path"] == "deployments.app:build"
    OutriderConfig.model_validate(application["args"])


def test_lm_drafts_run_apart_and_all_others_inline_unless_told() -> None:
    assert [draft.inline for draft in DEFAULT.pool] == [True, True, True, True, False]
    assert [draft.name for draft in DEFAULT.draft_actors] == ["lm"]
    told = DraftConfig(name="far", kind="ngram", placement="actor")
    assert not told.inline


def test_the_default_target_may_be_written_as_its_makers_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()  # a folder of that name does not get in the way
    for name in ("SmolLM2-135M-Instruct", "smollm2-135m-instruct"):
        config = OutriderConfig.model_validate({"target": {"model": name}})
        assert config.target.served_name == "smollm2-135m-instruct"
        assert config.pool == DEFAULT.pool


def test_where_to_listen_is_not_the_applications_to_say() -> None:
    from deployments.app import build

    with pytest.raises(ValueError, match=r"^http: is for `outrider serve`"):
        build(OutriderConfig.model_validate({"http": {"port": 9000}}))

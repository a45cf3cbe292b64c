"""Config, tokenizer, chat template and revision from elsewhere, as options of all models or of one."""

from __future__ import annotations

import json
import shutil
import urllib.request

import pytest
from support import tiny_models
from support.server_process import ScriptedServer

from parley import LLM, hub
from parley.cli import doctor
from parley.cli.serve import offered_models
from parley.settings.config import SERVE_OPTIONS
from parley.settings.options import ConfigError, resolve_options
from parley.types import ModelOverrides

TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of the test's own, which holds derived folders."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def copy(tmp_path, tiny):
    return shutil.copytree(tiny, tmp_path / "copy")


def find(model, **overrides):
    return hub.find_model(str(model), overrides=ModelOverrides(**overrides))


def refusal(model, **overrides) -> str:
    with pytest.raises(hub.ModelMissing) as error:
        hub.resolve_model(str(model), overrides=ModelOverrides(**overrides))
    message = str(error.value)
    assert message.endswith(".") and "\n" not in message
    return message


def test_without_overrides_the_folder_itself_is_used(copy, cache):
    assert find(copy) == copy and not cache.exists()


def test_members_of_the_config_are_merged_and_all_other_files_linked(copy):
    (copy / "config.json").write_text(
        '{"model_type": "llama", "rope_scaling": {"factor": 2, "type": "linear"}, "a": 1}'
    )
    (copy / ".parley").mkdir()
    changes = {"rope_scaling": {"factor": 4.5}, "a": None, "new": [1]}
    folder = find(copy, hf_overrides=changes)
    assert json.loads((folder / "config.json").read_text()) == {
        "model_type": "llama", "rope_scaling": {"factor": 4.5, "type": "linear"}, "a": None, "new": [1],
    }  # fmt: skip
    assert {path.name for path in folder.iterdir()} == {path.name for path in copy.iterdir()} - {".parley"}
    assert (folder / "model.safetensors").resolve() == copy / "model.safetensors"
    assert find(copy, hf_overrides=changes) == folder != find(copy, hf_overrides={"a": 2})
    (copy / "config.json").write_text('{"model_type": "qwen2"}')
    assert json.loads((find(copy, hf_overrides=changes) / "config.json").read_text())["model_type"] == "qwen2"


def test_a_tokenizer_brings_its_chat_template_and_no_other_file(copy, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text('{"other": 1}')
    (other / "chat_template.jinja").write_text(TEMPLATE)
    (other / "generation_config.json").write_text("{}")
    folder = find(copy, tokenizer=str(other))
    names = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "tokenizer.json").read_text() == '{"other": 1}'
    (copy / "tokenizer.json").unlink()  # not needed
    assert find(copy, tokenizer=str(other)) == folder
    assert hub.resolve_model(str(copy), overrides=ModelOverrides(tokenizer=str(other))) == folder


def test_a_chat_template_is_a_file_or_a_text_and_replaces_named_ones(copy, tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE + "é", encoding="utf-8")
    (copy / "additional_chat_templates").mkdir()
    for template, text in ((str(tmp_path / "t.jinja"), TEMPLATE + "é"), (TEMPLATE, TEMPLATE), ("a\nb", "a\nb")):
        folder = find(copy, chat_template=template)
        assert (folder / "chat_template.jinja").read_text("utf-8") == text
        assert not (folder / "additional_chat_templates").exists()


def test_unusable_overrides_are_refused_in_one_sentence(copy, tmp_path, tiny):
    assert "chat template nowhere.jinja cannot be read: No such file" in refusal(copy, chat_template="nowhere.jinja")
    (tmp_path / "t").write_bytes(b"\xff")
    assert f"chat template {tmp_path / 't'} is not UTF-8" in refusal(copy, chat_template=str(tmp_path / "t"))
    assert "cannot be read: Is a directory" in refusal(copy, chat_template=str(tmp_path))
    assert "no name on the hub, so it has no revision main" in refusal(copy, revision="main")
    assert "it is built in, so it has no revision" in refusal("", revision="main")
    assert "its name has a revision, and revision is b" in refusal("owner/name@a", revision="b")
    assert "The tokenizer ./nowhere cannot be used: there is no such folder" in refusal(copy, tokenizer="./nowhere")
    assert "The tokenizer /tmp cannot be used: its folder has no tokenizer.json" in refusal(copy, tokenizer="/tmp")
    (copy / "config.json").write_text("[]")
    assert "config.json does not hold a JSON object" in refusal(copy, hf_overrides={"a": 1})
    (copy / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refusal(copy, hf_overrides={"a": 1})
    (copy / "model.safetensors").unlink()
    assert "no *.safetensors weights" in refusal(copy, tokenizer=str(tiny))


def test_a_cache_that_cannot_be_written_is_one_sentence(copy, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "cannot be written: Not a directory; set XDG_CACHE_HOME" in refusal(copy, hf_overrides={"a": 1})


def models(*flags: str):
    return offered_models(resolve_options(SERVE_OPTIONS, flags, {}))


def test_models_can_have_different_overrides():
    own = 'a=./m,hf-overrides={"rope_scaling": {"type": "yarn", "factor": 2}, "b": 1},revision=r'
    own += ",tokenizer=o/t@x,threads=1"
    first, second = models("--model", own, "--model", "b=./n", "--chat-template", "t.jinja", "--revision", "main")
    assert first.settings.overrides == ModelOverrides(
        "r", "o/t@x", "t.jinja", {"rope_scaling": {"type": "yarn", "factor": 2}, "b": 1}
    )
    assert first.settings.threads == 1 and second.settings.overrides == ModelOverrides("main", "", "t.jinja")
    kind = next(option for option in SERVE_OPTIONS if option.name == "model").kind
    assert kind.parse_raw(kind.format_value(kind.parse_raw(own))) == kind.parse_raw(own)


@pytest.mark.parametrize("text", ["[1]", "{", "", "1", "null"])
def test_overrides_of_the_config_are_a_json_object(text):
    with pytest.raises(ConfigError, match=r"hf-overrides: .*is not a JSON object"):
        resolve_options(SERVE_OPTIONS, [f"--hf-overrides={text}"], {})


def findings(*flags: str) -> set[str]:
    """Return the subjects of what doctor finds, and its observations where serve would refuse the model."""
    found = list(doctor.check_models(resolve_options(SERVE_OPTIONS, flags, {})))
    return {finding.observation if finding.level == "fail" else finding.subject for finding in found}


def test_server_reads_the_overrides_and_doctor_agrees(copy, tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    (copy / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    flags = ["--tokenizer", str(tmp_path), "--chat-template", str(tmp_path / "t.jinja")]
    with ScriptedServer(copy, *flags) as server:
        body = {"messages": [{"role": "user", "content": "fox"}], "return_token_strs": True}
        with urllib.request.urlopen(server.wait_until_ready().url + "/tokenize", json.dumps(body).encode()) as answer:
            assert "".join(json.load(answer)["token_strs"]) == "[fox]"
    assert findings(str(copy), "--scripted-engine", *flags) == {"model", "tokenizer", "memory"}
    with ScriptedServer(copy, "--chat-template", "nowhere.jinja", "--tokenizer", str(tmp_path)) as server:
        assert server.wait_for_end() == 1
        sentence = (
            f"{copy} cannot be served: the chat template nowhere.jinja cannot be read: No such file or directory."
        )
        assert any(sentence in line for line in server.lines)
    assert sentence in findings(str(copy), "--chat-template", "nowhere.jinja", "--tokenizer", str(tmp_path))


def test_llm_computes_with_the_overridden_config(tmp_path):
    model = str(tiny_models.model_folder("qwen3"))
    with LLM(model, hf_overrides={"max_position_embeddings": 99}, dtype="float", kv_memory=8 << 20) as llm:
        info = llm.model.model_info
        assert (info.max_model_len, info.dtype) == (99, "float32")

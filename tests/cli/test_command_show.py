"""``parley show``: the facts about a model on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import gguf_files

from parley.cli.main import main


def shown_facts(model: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["show", str(model), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_gguf_file_has_as_many_parameters_as_the_folder_that_it_was_made_of(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = gguf_files.write_folder(tmp_path / "folder", "llama")
    file = gguf_files.write_gguf(tmp_path / "model.gguf", folder, "Q8_0")
    of_folder, of_file = shown_facts(folder, capsys), shown_facts(file, capsys)
    assert of_folder["parameters"] and of_file["parameters"] == of_folder["parameters"]
    assert {kind.split()[1] for kind in of_file["numbers"]} == {"F32", "Q8_0"}

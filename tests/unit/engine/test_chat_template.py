"""Where a checkpoint's chat template may lie."""

import json
import shutil
from pathlib import Path

import pytest

from epd_engine.models.checkpoint import Checkpoint
from epd_engine.server.protocol import Message
from epd_engine.server.text import ChatTokenizer
from tests.support.digits import MODEL

HELLO = [Message(role="user", content="seven")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The shipped model's, without its template."""
    for path in MODEL.iterdir():
        if path.name != "chat_template.jinja":
            shutil.copy(path, tmp_path)
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    said.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    return tmp_path


def test_a_template_in_the_processors_older_file_is_found(folder: Path) -> None:
    expected = ChatTokenizer(Checkpoint.find(str(MODEL), None)).encode_chat(HELLO)
    template = (MODEL / "chat_template.jinja").read_text()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert ChatTokenizer(Checkpoint.find(str(folder), None)).encode_chat(HELLO) == expected


def test_a_template_in_a_file_of_its_own_comes_first(folder: Path) -> None:
    expected = ChatTokenizer(Checkpoint.find(str(MODEL), None)).encode_chat(HELLO)
    shutil.copy(MODEL / "chat_template.jinja", folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "other"}))
    assert ChatTokenizer(Checkpoint.find(str(folder), None)).encode_chat(HELLO) == expected

"""Measured digests: of what the engine loads, and of nothing else."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest

from strongroom.connectors.digests import main, measure
from strongroom.errors import Conflict, Missing


@pytest.fixture
def model(tmp_path: Path) -> Path:
    files = {
        "config.json": b"{}",
        "model-00001-of-00002.safetensors": b"weights one",
        "model-00002-of-00002.safetensors": b"weights two",
        "tokenizer.json": b"words",
        "tokenizer_config.json": b"more words",
        "chat_template.jinja": b"{{ messages }}",
        "README.md": b"read me",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_a_digest_is_the_one_that_is_written_down(model: Path) -> None:
    content = b"{{ messages }}"
    expected = hashlib.sha256(
        b"strongroom/measured/v1"
        + struct.pack("<I", 8) + b"template"
        + struct.pack("<I", 19) + b"chat_template.jinja"
        + struct.pack("<Q", len(content)) + hashlib.sha256(content).digest()
    )  # fmt: skip
    assert measure(model).template == expected.hexdigest()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("config.json", "model"),
        ("model-00002-of-00002.safetensors", "model"),
        ("tokenizer.json", "tokenizer"),
        ("tokenizer_config.json", "tokenizer"),
        ("chat_template.jinja", "template"),
    ],
)
def test_one_changed_byte_changes_its_part_alone(model: Path, name: str, part: str) -> None:
    before = measure(model)
    content = bytearray((model / name).read_bytes())
    content[0] ^= 1
    (model / name).write_bytes(bytes(content))
    after = measure(model)
    for field in ("model", "tokenizer", "template"):
        assert (getattr(after, field) != getattr(before, field)) == (field == part)


def test_two_files_that_change_places_are_another_model(model: Path) -> None:
    before = measure(model)
    one, two = (model / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert measure(model).model != before.model


def test_an_added_file_of_weights_is_another_model(model: Path) -> None:
    before = measure(model)
    (model / "extra.safetensors").write_bytes(b"")
    assert measure(model).model != before.model


def test_what_the_engine_does_not_load_changes_nothing(model: Path) -> None:
    before = measure(model)
    (model / "README.md").write_bytes(b"other")
    (model / ".ready").touch()
    assert measure(model) == before


def test_a_tokenizer_of_another_folder_is_measured_there(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_bytes(b"other words")
    assert measure(model, other).tokenizer != measure(model).tokenizer
    assert measure(model, other).model == measure(model).model


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(Missing):
        measure(tmp_path)


def test_a_file_that_changes_while_it_is_read_is_refused(model: Path) -> None:
    def grow(name: str, done: int, total: int) -> None:
        with (model / "config.json").open("ab") as file:
            file.write(b" ")

    with pytest.raises(Conflict):
        measure(model, progress=grow)


def test_the_command_prints_the_three_and_its_progress_elsewhere(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(model)]) == 0
    captured = capsys.readouterr()
    measured = measure(model)
    assert json.loads(captured.out) == {
        "model": measured.model,
        "tokenizer": measured.tokenizer,
        "template": measured.template,
    }
    assert "config.json" in captured.err


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "no weights" in capsys.readouterr().err

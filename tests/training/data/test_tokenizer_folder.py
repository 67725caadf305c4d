"""Which files of a folder belong to its tokenizer."""

from __future__ import annotations

from pathlib import Path

from training.data.tokenizer_folder import files_in, has_tokenizer, token_in, values_of


def test_the_files_of_a_tokenizer_are_found_with_all_its_templates(tmp_path: Path):
    (tmp_path / "additional_chat_templates").mkdir()
    taken = ("tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tools.jinja", "tokenizer.model")
    for name in (*taken, "model.safetensors", "config.json", "additional_chat_templates/secret.txt"):
        (tmp_path / name).write_text("{}")
    assert set(files_in(tmp_path)) == set(taken)
    assert has_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    assert not has_tokenizer(tmp_path)


def test_special_tokens_are_texts_or_mappings(tmp_path: Path):
    assert values_of(tmp_path) == {}
    (tmp_path / "tokenizer_config.json").write_text("[")
    assert values_of(tmp_path) == {}
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "a"}, "bos_token": "b", "pad_token": 3}')
    values = values_of(tmp_path)
    assert [token_in(values, f"{name}_token") for name in ("eos", "bos", "pad", "unk")] == ["a", "b", None, None]

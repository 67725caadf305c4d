"""Facts of a model are found beside its weights, or at its source, and not for a model with ids of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training.helpers.in_process import TINY_RUN, components_of
from tests.training.helpers.pretrained_folder import STOPS, save_pretrained
from training.data.tokenizer import load_tokenizer
from training.errors import UserError
from training.weights.origin import ends_of, origin_of, stops_of, values_in

JOB = (*(entry for entry in TINY_RUN if not entry.startswith("model.")), "dataset=text", "dataset.files=a", "model=hf")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_pretrained(folder)
    return folder


def test_weights_and_the_tokenizer_of_the_source_make_it_the_origin(base: Path, tmp_path: Path):
    job = (*JOB, f"model.source={base}")
    for given in ((), ("model.weights=null",), (f"model.weights={base}/model.safetensors",)):
        config = components_of(*job, *given).config
        assert origin_of(config) == base
        assert stops_of(config, load_tokenizer(config.dataset.tokenizer)) == {*STOPS}
    # Ids of its own: the numbers of the source mean other tokens.
    own = components_of(*job, "model.weights=null", "dataset.tokenizer=null").config
    assert origin_of(own) is None
    assert stops_of(own, load_tokenizer(None)) == {256}
    assert origin_of(components_of(*JOB, "model.source=qwen2").config) is None


def test_the_ends_of_both_files_count(tmp_path: Path):
    assert (ends_of(None), ends_of(tmp_path), values_in(tmp_path)) == ((), (), {})
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert ends_of(tmp_path) == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, None]}))
    assert ends_of(tmp_path) == (7, 5)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is not JSON: download it again"):
        ends_of(tmp_path)

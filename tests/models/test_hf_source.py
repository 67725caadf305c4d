import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from models.hf import build_hf
from models.hf_source import SHAPES, find_source


def folder_of(values: dict, folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


class TestFindSource:
    def test_a_model_type_begins_with_the_defaults(self):
        assert find_source("qwen3", "causal_lm").config().to_dict() == {**Qwen3Config().to_dict(), "use_cache": False}

    def test_a_folder_begins_with_its_file(self, tmp_path: Path):
        Qwen3Config(hidden_size=64, num_hidden_layers=3).save_pretrained(tmp_path)
        config = find_source(str(tmp_path), "causal_lm").config({"num_hidden_layers": 2})
        assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 2, Qwen3Config().vocab_size)

    @pytest.mark.parametrize(
        ("source", "task", "message"),
        [
            ("gpt2", "regression", "^task='regression': must be one of causal_lm, classification$"),
            ("qwen33", "causal_lm", "'qwen33' is neither a model type of transformers nor a folder.*qwen3"),
            ("https://huggingface.co/Qwen/Qwen3-8B", "causal_lm", "nor OWNER/NAME of the Hub"),
            ("gpt2", "classification", "gpt2 has no model for task=class"),
            ("t5", "causal_lm", "^t5 has no model for task=causal_lm$"),
            ("vit", "causal_lm", r"^vit has no model for task=causal_lm; it has one for model\.task=class"),
            *((name, "causal_lm", f"^{name} sees later tokens too") for name in ("xlnet", "xlm", "cpmant")),
            ("siglip2", "classification", "^siglip2 takes .* and not images alone: take another model"),
            ("reformer", "causal_lm", "^reformer draws a new seed in each forward"),
        ],
    )
    def test_an_architecture_that_does_not_fit_is_refused(self, source: str, task: str, message: str):
        with pytest.raises(ValueError, match=message):
            find_source(source, task)

    def test_a_configuration_that_lets_tokens_see_later_ones_is_refused(self, tmp_path: Path):
        text = {"model_type": "gemma3_text", "use_bidirectional_attention": True}
        source = find_source(folder_of(text, tmp_path), "causal_lm")
        with pytest.raises(ValueError, match=r"^use_bidirectional_attention=True: gemma3_text sees later tokens too"):
            source.config()
        assert not source.config({"use_bidirectional_attention": None}).use_bidirectional_attention
        with pytest.raises(ValueError, match=r"^use_bidirectional_attention=all: gemma4_text sees later tokens too"):
            find_source("gemma4_text", "causal_lm").config({"use_bidirectional_attention": "all"})
        embeds = find_source(folder_of({"model_type": "qwen2", "is_causal": False}, tmp_path), "causal_lm")
        with pytest.raises(ValueError, match=r"^is_causal=false: qwen2 sees later tokens too"):
            embeds.config()
        assert embeds.config({"is_causal": True}).is_causal

    @pytest.mark.parametrize(
        ("values", "task", "mended"),
        [
            ({"model_type": "bamba", "z_loss_coefficient": 0.1}, "causal_lm", {"z_loss_coefficient": 0.0}),
            ({"model_type": "prophetnet"}, "causal_lm", {"disable_ngram_loss": True}),
            ({"model_type": "prophetnet", "disable_ngram_loss": True, "eps": 0.1}, "causal_lm", {"eps": 0.0}),
            *(
                ({"model_type": "vit", "problem_type": problem}, "classification", {"problem_type": None})
                for problem in ("multi_label_classification", "regression")
            ),
        ],
    )
    def test_another_loss_than_cross_entropy_is_refused(self, tmp_path: Path, values: dict, task: str, mended: dict):
        source = find_source(folder_of(values, tmp_path), task)
        with pytest.raises(ValueError, match=rf"^{next(iter(mended))}=.* trains with another loss than cross-entropy"):
            source.config()
        source.config(mended)

    def test_a_model_with_layers_for_each_language_needs_one(self):
        source = find_source("xmod", "causal_lm")
        with pytest.raises(ValueError, match=r"^default_language=null: xmod has layers for .* one of en_XX$"):
            source.config()
        assert source.config({"default_language": "en_XX"}).default_language == "en_XX"

    def test_an_encoder_is_a_decoder_in_this_task(self, tmp_path: Path):
        for source in ("bert", folder_of({"model_type": "bert", "is_decoder": False}, tmp_path)):
            assert find_source(source, "causal_lm").config().is_decoder

    def test_a_folder_that_is_no_model_is_refused(self, tmp_path: Path):
        with pytest.raises(ValueError, match=r"has no config\.json"):
            find_source(str(tmp_path), "causal_lm")
        (tmp_path / "config.json").write_text("[]")
        with pytest.raises(ValueError, match="is not a configuration"):
            find_source(str(tmp_path), "causal_lm")

    def test_code_of_a_checkpoint_and_quantised_weights_are_refused(self, tmp_path: Path):
        source = folder_of({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}, tmp_path)
        with pytest.raises(ValueError, match=r"model_type='mine'.*code of a checkpoint is not run"):
            find_source(source, "causal_lm")
        source = folder_of({"model_type": "gpt2", "quantization_config": {"quant_method": "fp8"}}, tmp_path)
        with pytest.raises(ValueError, match="quantised"):
            find_source(source, "causal_lm")


# In millions, as their authors state them.
MILLIONS = {
    "qwen3_8b": 8191, "qwen3_30b_a3b": 30532, "gpt_oss_20b": 20915, "glm_air": 106852, "mixtral_small": 1517,
    "gpt2_124m": 124, "mamba_130m": 129, "vit_l": 304,
}  # fmt: skip


def test_a_shape_has_as_many_positions_as_its_authors_trained():
    for name in ("qwen3_8b", "qwen3_30b_a3b"):
        assert find_source(name, "causal_lm").config(None).max_position_embeddings == 40960


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_parameters_of_their_models(name: str):
    with torch.device("meta"):
        model = build_hf(name, "classification" if name == "vit_l" else "causal_lm")
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == MILLIONS[name]

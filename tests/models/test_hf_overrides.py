import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Gemma3Config

from models.hf import build_hf
from models.hf_source import find_source, sub_configs


def folder_of(values: dict, folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


class TestOverrides:
    def test_both_names_of_a_value_are_known(self):
        source = find_source("gpt2", "causal_lm")
        assert source.config({"n_embd": 48}).hidden_size == source.config({"hidden_size": 48}).n_embd == 48

    def test_an_override_comes_before_a_value_of_the_file_under_its_other_name(self, tmp_path: Path):
        source = find_source(folder_of({"model_type": "gpt2", "n_embd": 24, "n_head": 2}, tmp_path), "causal_lm")
        assert source.config({"hidden_size": 48}).n_embd == 48
        assert source.config().n_embd == 24

    def test_values_that_depend_on_others_follow(self):
        config = find_source("qwen3", "causal_lm").config({"num_hidden_layers": 4})
        assert len(config.layer_types) == 4

    @pytest.mark.parametrize(
        ("kind", "overrides"),
        [
            ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
            ("smollm3", {"no_rope_layer_interval": 2}),
            ("glm_moe_dsa", {"first_k_dense_replace": 2}),
            ("llama4_text", {"num_hidden_layers": 4}),
            ("gemma4_text", {"num_hidden_layers": 6}),
        ],
    )
    def test_so_they_do_where_a_file_has_them_too(self, kind: str, overrides: dict, tmp_path: Path):
        find_source(kind, "causal_lm").config().save_pretrained(tmp_path)
        config = find_source(str(tmp_path), "causal_lm").config(overrides)
        for part in (config, expected := find_source(kind, "causal_lm").config(overrides)):
            part.architectures = part.dtype = None
        assert config.to_dict() == expected.to_dict()

    def test_layers_that_are_as_nothing_else_says_stay(self, tmp_path: Path):
        layers = ["conv", "full_attention", "conv", "conv"]
        AutoConfig.for_model("lfm2", num_hidden_layers=4, layer_types=layers).save_pretrained(tmp_path)
        assert find_source(str(tmp_path), "causal_lm").config({"hidden_size": 64}).layer_types == layers

    def test_a_mapping_is_merged(self):
        config = find_source("qwen3", "causal_lm").config({"rope_parameters": {"rope_theta": 5e5}})
        assert config.rope_parameters == {"rope_theta": 5e5, "rope_type": "default"}

    def test_a_mapping_comes_before_the_older_name_of_it_in_a_file(self, tmp_path: Path):
        llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        older = {"rope_theta": 5e5, "rope_scaling": llama3 | {"original_max_position_embeddings": 64}}
        source = find_source(folder_of({"model_type": "llama"} | older, tmp_path), "causal_lm")
        changed = source.config({"rope_parameters": {"rope_theta": 1e6, "factor": 16.0}}).rope_parameters
        assert changed == source.config().rope_parameters | {"rope_theta": 1e6, "factor": 16.0}

    def test_angles_have_an_older_name_for_their_type(self):
        config = find_source("qwen3", "causal_lm").config({"rope_parameters": {"type": "yarn", "factor": 4.0}})
        assert (config.rope_parameters["rope_type"], config.rope_parameters["factor"]) == ("yarn", 4.0)

    def test_angles_of_each_type_of_layer_are_merged(self):
        source = find_source("olmo3", "causal_lm")
        config = source.config({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}})
        before = source.config().rope_parameters
        full = before["full_attention"] | {"rope_type": "linear", "factor": 8.0}
        assert config.rope_parameters == before | {"full_attention": full}
        with pytest.raises(ValueError, match=r"each type of layer has its own here: give {full_attention: {rope_type"):
            source.config({"rope_parameters": {"rope_type": "linear", "factor": 8.0}})

    def test_sub_configurations_are_merged_and_none_keeps_a_cache(self, tmp_path: Path):
        Gemma3Config(text_config={"hidden_size": 64, "num_hidden_layers": 2}).save_pretrained(tmp_path)
        for source in ("gemma3", str(tmp_path)):
            config = find_source(source, "causal_lm").config({"text_config": {"num_hidden_layers": 3}})
            assert config.text_config.num_hidden_layers == 3
            width = Gemma3Config().text_config.hidden_size if source == "gemma3" else 64
            assert config.text_config.hidden_size == width
            assert not any(getattr(part, "use_cache", False) for part in sub_configs(config))
            assert len(list(sub_configs(config))) == 3

    def test_a_value_that_some_layers_have_of_their_own_is_that_of_the_others(self):
        layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
        config = find_source("gemma4_text", "causal_lm").config({**layers, "head_dim": 8})
        assert [layer.head_dim for layer in config.per_layer_config] == [8, 512]
        with pytest.raises(ValueError, match="head_dim='wide': must be int or float"):
            find_source("gemma4_text", "causal_lm").config({"head_dim": "wide"})

    def test_a_key_that_only_the_model_reads_can_be_given(self):
        with torch.device("meta"):
            model = build_hf("qwen3_moe", "causal_lm", {"head_dim": 16, "num_attention_heads": 4})
        assert model.hf.model.layers[0].self_attn.q_proj.out_features == 64

    @pytest.mark.parametrize("error", [ImportError, RuntimeError, IndexError])
    def test_whatever_a_class_raises_is_one_line(self, error: type[Exception], monkeypatch: pytest.MonkeyPatch):
        def refuse(*_: object) -> None:
            raise error("it lacks\na package")

        source = find_source("qwen3", "causal_lm")
        monkeypatch.setattr(source.config_class, "from_dict", refuse)
        with pytest.raises(ValueError, match=r"^the configuration of qwen3: it lacks a package$"):
            source.config()

    def test_classes_are_counted_anew(self, tmp_path: Path):
        AutoConfig.for_model("vit", num_labels=7).save_pretrained(tmp_path)
        source = find_source(str(tmp_path), "classification")
        assert (source.config().num_labels, source.config({"num_labels": 3}).num_labels) == (7, 3)
        named = source.config({"id2label": {0: "ant"}})
        assert (named.id2label[0], named.label2id["ant"], len(named.label2id)) == ("ant", 0, 7)

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ({"attention_dropout": 1.5}, r"^attention_dropout=1\.5: must be between 0 and 1$"),
            ({"attention_dropout": -0.1}, r"^attention_dropout=-0\.1: must be between 0 and 1$"),
            ({"initializer_range": -0.5}, r"^initializer_range=-0\.5: must be at least 0$"),
            ({"num_hidden_layer": 4}, "num_hidden_layer=4: qwen3 has no such key; near to it: num_hidden_layers"),
            ({"num_hidden_layers": "four"}, "num_hidden_layers='four': must be int or float"),
            ({"num_hidden_layers": -1}, "num_hidden_layers=-1: must be at least 0"),
            ({"num_hidden_layers": True}, "num_hidden_layers=True: must be int or float"),
            ({"num_hidden_layers": 2.5}, "qwen3: .*num_hidden_layers"),
            ({"tie_word_embeddings": 1}, "tie_word_embeddings=1: must be bool"),
            ({"rope_parameters": 5}, "rope_parameters=5: must be dict"),
            ({"rope_parameters": {"factor": 4.0}}, "factor has no effect on rope_type=default: give rope_type"),
            ({"rope_scaling": {"factor": 2}}, "qwen3 has no such key; near to it: rope_parameters"),
            ({"use_cache": True}, "use_cache=True: cannot be given, because training keeps no"),
            ({"is_decoder": False}, "is_decoder=False: cannot be given"),
            ({"dtype": "bfloat16"}, "the precision of the run decides"),
            ({"attn_implementation": "eager"}, "has no such key"),
            ({"layer_types": ["full_attention"]}, "qwen3: .*num_hidden_layers"),
            (
                {"sliding_window": 8},
                "^sliding_window=8: qwen3 makes None of it: it may follow from use_sli",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused_in_one_line(self, overrides: dict, message: str):
        with pytest.raises(ValueError, match=message) as caught:
            find_source("qwen3", "causal_lm").config(overrides)
        assert "\n" not in str(caught.value)

    def test_an_older_name_that_a_class_declares_and_no_model_reads_is_refused(self):
        with pytest.raises(ValueError, match=r"cohere2_moe has no such key; near to it: rope_parameters"):
            find_source("cohere2_moe", "causal_lm").config({"rope_scaling": {"rope_type": "linear", "factor": 4.0}})

    def test_a_nested_key_is_named_with_its_path(self):
        with pytest.raises(ValueError, match=r"text_config\.hidden_sizes=4: gemma3_text has no such key"):
            find_source("gemma3", "causal_lm").config({"text_config": {"hidden_sizes": 4}})

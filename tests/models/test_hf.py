"""Models of transformers behind one way to call each; `tests/models/test_hf_modes.py` trains them under the modes."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.generation import can_generate
from models.hf import build_hf, cross_entropy
from models.hf_source import same_again, sub_configs
from models.loss import Head
from offload.planning import left_as_found
from tests.models.helpers.hf_models import BATCH, CLASSES, LANGUAGE, LENGTH, MODELS, VISION, VOCABULARY, batch, tiny
from tests.models.helpers.packed import far_from_uniform

# A bias, capped or scaled logits, an auxiliary loss, or a forward that calls the model below the head in parts.
WITH_LOGITS = {"bert", "gemma2", "granite", "mixtral_balanced", "opt"}


class TestCausalLanguageModel:
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    @pytest.mark.parametrize("name", LANGUAGE)
    def test_losses_and_gradients_are_those_of_transformers(self, name: str, reduction: str):
        # Without dropout.
        model = tiny(name).eval()
        ids, labels = batch(name)
        labels = labels.masked_fill(torch.arange(LENGTH) == 2, -100)
        losses = model(ids, labels, reduction=reduction)
        weights = torch.linspace(-1, 2, losses.numel()).view(losses.shape)
        (losses * weights).sum().backward()
        found = {name: parameter.grad for name, parameter in model.hf.named_parameters()}
        model.zero_grad()
        if reduction == "mean":
            expected = model.hf(input_ids=ids, labels=labels, shift_labels=labels).loss
        else:
            logits = model.hf(input_ids=ids).logits
            expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        (expected.view(losses.shape) * weights).sum().backward()
        assert losses.dtype == torch.float32
        torch.testing.assert_close(losses, expected.view(losses.shape))
        for parameter_name, parameter in model.hf.named_parameters():
            torch.testing.assert_close(found[parameter_name], parameter.grad, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    @pytest.mark.parametrize("name", LANGUAGE)
    def test_plain_heads_compute_the_loss_in_chunks(self, name: str, device: str):
        model = tiny(name, device)
        assert model.chunked_loss == (name not in WITH_LOGITS)
        assert isinstance(model.hf.get_output_embeddings(), Head) == model.chunked_loss

    @pytest.mark.parametrize("name", ["bert", "mamba", "qwen3"])
    def test_no_position_sees_later_tokens(self, name: str):
        model = tiny(name).eval()
        ids, _ = batch(name)
        later = ids.clone()
        later[:, 4:] = (ids[:, 4:] + 1) % VOCABULARY
        one, other = (model.hf(input_ids=given).logits for given in (ids, later))
        torch.testing.assert_close(one[:, :4], other[:, :4])
        assert not torch.allclose(one[:, 4:], other[:, 4:])

    @pytest.mark.parametrize("name", ["bart", "gptj", "xglm", *LANGUAGE])
    def test_a_padded_row_is_the_sample_alone(self, name: str):
        """No position sees a later one, so padding at the end needs no mask."""
        model = tiny(name).eval()
        ids, labels = batch(name)
        padding = torch.arange(LENGTH) >= 4
        losses = model(ids.masked_fill(padding, 0), labels.masked_fill(padding, -100), reduction="none")
        alone = model(ids[:, :4], labels[:, :4], reduction="none")
        torch.testing.assert_close(losses[:, :4], alone, rtol=1e-5, atol=1e-5)
        assert not losses[:, 4:].any()

    def test_ties_stay(self):
        model = tiny("qwen3_tied")
        assert model.hf.get_output_embeddings().weight is model.hf.get_input_embeddings().weight

    def test_the_auxiliary_loss_is_added_when_asked_for(self):
        plain, balanced = tiny("mixtral"), tiny("mixtral_balanced")
        balanced.load_state_dict(plain.state_dict())
        arguments = batch("mixtral")
        difference = balanced(*arguments) - plain(*arguments)
        auxiliary = balanced.hf(input_ids=arguments[0]).aux_loss
        expected = balanced.hf.config.router_aux_loss_coef * auxiliary
        torch.testing.assert_close(difference, expected, rtol=1e-3, atol=1e-6)

    @pytest.mark.parametrize("name", ["qwen3", "gemma2"])
    def test_without_labels_that_count_the_loss_is_zero(self, name: str):
        model = tiny(name)
        ids, labels = batch(name)
        loss = model(ids, torch.full_like(labels, -100))
        loss.backward()
        assert loss == 0
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())

    def test_labels_of_another_shape_are_refused(self):
        with pytest.raises(ValueError, match="must have the shape of input_ids"):
            tiny("gpt2")(*(part[:, :n] for part, n in zip(batch("gpt2"), (4, 3), strict=True)))

    def test_no_model_keeps_a_cache_in_training(self):
        for name in ("qwen3", "mamba", "gpt2"):
            model = tiny(name, "meta")
            assert not any(getattr(part, "use_cache", False) for part in sub_configs(model.hf.config))


class TestImageClassifier:
    @pytest.mark.parametrize("name", [*VISION, "pp_lcnet"])
    def test_logits_are_those_of_transformers(self, name: str):
        model = tiny(name)
        (images,) = batch(name)
        logits = model.eval()(images)
        assert logits.shape == (BATCH, CLASSES)
        assert torch.equal(logits, model.hf(pixel_values=images, return_dict=False)[0])


class TestBuildHf:
    @pytest.mark.parametrize("name", [*MODELS, "diffllama"])
    def test_nothing_is_allocated_on_the_meta_device(self, name: str):
        model = tiny(name, "meta")
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))

    def test_values_are_those_of_transformers(self):
        torch.manual_seed(0)
        expected = AutoModelForCausalLM.from_config(tiny("qwen3", "meta").hf.config, dtype=torch.float32)
        for name, tensor in tiny("qwen3").hf.state_dict().items():
            assert torch.equal(tensor, expected.state_dict()[name])

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_the_attention_backend_is_set(self, attention: str):
        assert tiny("qwen3", "meta", attention).hf.config._attn_implementation == attention

    def test_the_backend_and_the_activation_that_a_file_names(self, tmp_path: Path):
        config = tiny("qwen3", "meta").hf.config.to_dict()
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config | {"attn_implementation": "flash_attention_2"}))
        assert build_hf(str(tmp_path), "causal_lm").hf.config._attn_implementation == "sdpa"
        file.write_text(json.dumps(config | {"hidden_act": "nonsense"}))
        with pytest.raises(ValueError, match=r"^qwen3: there is no 'nonsense'$"):
            build_hf(str(tmp_path), "causal_lm")

    def test_auto_takes_what_there_is(self):
        assert tiny("qwen3", "meta").hf.config._attn_implementation == "sdpa"
        assert tiny("gpt_oss", "meta").hf.config._attn_implementation == "eager"

    @pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2", "nonsense"])
    def test_a_backend_that_cannot_be_had_is_refused_in_one_line(self, attention: str):
        with pytest.raises(ValueError, match=f"gpt_oss: .*attention={attention}: auto takes") as caught:
            tiny("gpt_oss", "meta", attention)
        assert "\n" not in str(caught.value)

    def test_sizes_that_do_not_fit_are_refused(self):
        with pytest.raises(ValueError, match="gpt2: "):
            build_hf("gpt2", "causal_lm", {"n_embd": 17, "n_head": 2})


def test_the_mean_leaves_out_ignored_labels():
    logits = torch.randn(2, 3, VOCABULARY, dtype=torch.float64)
    labels = torch.tensor([[1, -100, 4], [-100, -100, 0]])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    torch.testing.assert_close(cross_entropy(logits, labels, mean=True), expected)


WITHOUT_CACHE = {"openai-gpt", "mamba"}


class TestKeysAndValues:
    @pytest.mark.parametrize("name", [name for name in LANGUAGE if name not in WITHOUT_CACHE])
    def test_one_position_after_another_gives_the_logits_of_all(self, name: str):
        model = tiny(name).eval()
        ids = batch(name)[0][:1]
        assert can_generate(model)
        with torch.no_grad():
            cache = model.key_value_cache(ids.shape[1])
            parts = [model(part, cache=cache) for part in (ids[:, :3], *ids[:, 3:].split(1, dim=1))]
            expected = model.hf(input_ids=ids).logits[:, 2:]
        assert [tuple(part.shape[:2]) for part in parts] == [(1, 1)] * 4
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("layers", [(1, 3), (3, 1)])
    def test_a_decoder_may_have_other_numbers_of_layers_than_its_encoder(self, layers: tuple[int, int]):
        sizes = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_target_positions": 16}
        tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        layers = dict(zip(("encoder_layers", "decoder_layers"), layers, strict=True))
        model = build_hf("whisper", "causal_lm", {**sizes, **tokens, "decoder_start_token_id": 1, **layers}).eval()
        ids = torch.randint(3, VOCABULARY, (1, 6), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            cache = model.key_value_cache(6)
            parts = [model(part, cache=cache) for part in (ids[:, :3], *ids[:, 3:].split(1, dim=1))]
            expected = model.hf(input_ids=ids).logits[:, 2:]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("name", [*sorted(WITHOUT_CACHE), "prophetnet"])
    def test_an_architecture_without_them_cannot_generate(self, name: str):
        assert not can_generate(tiny(name, "meta"))

    def test_slips_are_refused(self, monkeypatch: pytest.MonkeyPatch):
        model = tiny("gpt2").eval()
        ids = batch("gpt2")[0]
        with pytest.raises(ValueError, match="labels and a cache were given"):
            model(ids, ids, cache=model.key_value_cache(8))
        with pytest.raises(ValueError, match="segments and a cache were given"):
            model(ids, cache=model.key_value_cache(8), segments=torch.zeros_like(ids))
        forward = model.hf.forward
        monkeypatch.setattr(model.hf, "forward", lambda past_key_values, **given: forward(**given))
        with pytest.raises(ValueError, match="gpt2 does not store keys and values, so no text can be generated"):
            model(ids, cache=model.key_value_cache(8))


def test_tokens_that_the_head_cannot_predict_are_no_part_of_the_vocabulary():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    text = {**sizes, "vocab_size": VOCABULARY, "head_dim": 8, "ffn_dim": 32}
    small = {**sizes, "intermediate_size": 32, "head_dim": 8}
    with torch.device("meta"):
        model = build_hf("moshi", "causal_lm", {**text, "audio_encoder_config": small, "depth_decoder_config": text})
    assert model.hf.get_input_embeddings().num_embeddings == VOCABULARY + 1
    assert model.vocab_size == VOCABULARY


def test_a_weight_of_the_auxiliary_loss_under_another_name_counts():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 4, "vocab_size": 40}
    sizes |= {"intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "aux_loss_coef": 0.5}
    model = build_hf("jetmoe", "causal_lm", sizes | {"output_router_logits": True})
    ids = torch.arange(12).view(2, 6)
    output = model.hf(input_ids=ids, labels=ids)
    labels = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], dim=1)
    torch.testing.assert_close(model(ids, labels), output.loss)
    assert output.aux_loss > 0


def test_the_loss_of_a_row_does_not_depend_on_longer_rows_before():
    """Angles of the kind dynamic grow with the longest row that transformers has seen."""
    positions = {"max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    positions["rope_parameters"]["rope_theta"] = 1e4
    ids = torch.randint(3, VOCABULARY, (1, 31), generator=torch.Generator().manual_seed(0))
    used = far_from_uniform(tiny("llama", **positions))
    for length in (6, 30, 12, 8, 30, 6, 9):
        rows = ids[:, :length], ids[:, 1 : length + 1]
        assert torch.equal(used(*rows), far_from_uniform(tiny("llama", **positions))(*rows)), length


def test_an_auxiliary_loss_that_transformers_lacks_is_refused():
    with (
        torch.device("meta"),
        pytest.raises(ValueError, match=r"^output_router_logits=true: glm4_moe has no auxiliary"),
    ):
        build_hf("glm4_moe", "causal_lm", {"output_router_logits": True, "num_hidden_layers": 2})


@pytest.mark.parametrize("value", ["eager", "batched_mm"])
def test_experts_are_computed_as_given(value: str, monkeypatch: pytest.MonkeyPatch):
    products, own = [], torch.nn.functional.grouped_mm
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda *a, **k: products.append(1) or own(*a, **k))
    model, other = tiny("mixtral"), tiny("mixtral", experts_implementation=value)
    assert (model.experts_implementation, other.experts_implementation) == ("grouped_mm", value)
    expected = model(*batch("mixtral"))
    assert len(products) == 4
    torch.testing.assert_close(other(*batch("mixtral")), expected)
    assert len(products) == 4
    assert same_again(other.hf).config._experts_implementation == value
    assert tiny("qwen3").experts_implementation is None


def test_experts_that_nothing_computes_are_refused():
    with pytest.raises(ValueError, match=r"^experts_implementation='grouped': must be one of eager, batched_mm, "):
        tiny("mixtral", "meta", experts_implementation="grouped")
    for kernels in ("deepgemm", "sonicmoe"):
        with pytest.raises(ValueError, match=rf"^experts_implementation='{kernels}': .* only these train with torch"):
            tiny("mixtral", "meta", experts_implementation=kernels)
    with pytest.raises(ValueError, match=r"^experts_implementation=eager: qwen3 has no experts that take it"):
        tiny("qwen3", "meta", experts_implementation="eager")


def test_experts_are_balanced_by_their_logits_once_after_forwards_of_a_plan():
    model = tiny("mixtral_balanced")
    arguments = batch("mixtral_balanced")
    for _ in range(2):
        with left_as_found(model):
            model(*arguments)
    assert len(model.hf(input_ids=arguments[0]).router_logits) == model.hf.config.num_hidden_layers

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.hf import TransformersModel
from models.hf_files import load_hf
from offload import LayerStream
from tests.models.helpers.hf_models import MODELS, logits, tiny, trained, without_values
from tests.models.helpers.saving import save_hf
from tests.offload.helpers.models import under

FILE = "model.safetensors"
# Small enough that each layer has a file of its own.
SHARD_BYTES = 3000


def loaded(name: str, folder: Path) -> TransformersModel:
    model = without_values(name).eval()
    model.fill_buffers()
    load_hf(model, folder)
    return model


def same_state(one: nn.Module, other: nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[str, Callable[[dict[str, Tensor]], object]], Path]:
    """Saves a model, and changes the tensors of its file."""

    def change(name: str, edit: Callable[[dict[str, Tensor]], object]) -> Path:
        save_hf(trained(name), tmp_path)
        tensors = load_file(tmp_path / FILE)
        edit(tensors)
        save_file(tensors, tmp_path / FILE)
        return tmp_path

    return change


class TestBothWays:
    @pytest.mark.sampled
    @pytest.mark.parametrize("name", MODELS)
    def test_what_transformers_saved_is_loaded(self, name: str, tmp_path: Path):
        model = trained(name)
        model.hf.save_pretrained(tmp_path, max_shard_size=SHARD_BYTES)
        found = loaded(name, tmp_path)
        assert same_state(found, model)
        assert torch.equal(logits(name, found.hf), logits(name, model.hf))

    def test_a_mode_loads_and_saves(self, tmp_path: Path):
        save_hf(trained("mixtral"), tmp_path / "a")
        model = tiny("mixtral", "meta")
        with under(LayerStream(), model):
            model.fill_buffers()
            load_hf(model, tmp_path / "a")
            save_hf(model, tmp_path / "b")
        first, second = (load_file(tmp_path / folder / FILE) for folder in "ab")
        assert all(torch.equal(first[key], second[key]) for key in first)

    def test_values_are_converted_to_the_models_dtype(self, tmp_path: Path):
        model = trained("mixtral")
        save_hf(model, tmp_path)
        narrow = without_values("mixtral").to(torch.bfloat16)
        load_hf(narrow, tmp_path)
        assert same_state(narrow, model.to(torch.bfloat16))


def strip(tensors: dict[str, Tensor]) -> None:
    """As the checkpoint of GPT-2 on the Hub: its names lack the prefix, and it has the masks of attention."""
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    for key in list(tensors):
        tensors[key.removeprefix("transformer.")] = tensors.pop(key)


def age(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)


def twice(tensors: dict[str, Tensor]) -> None:
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def moved(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


class TestNamesOfFiles:
    def test_experts_are_stacked_in_the_order_of_their_numbers(self, tmp_path: Path):
        overrides = {"num_local_experts": 12}
        model = without_values("mixtral", **overrides)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.rand(parameter.shape))
        save_hf(model, tmp_path)
        stored = load_file(tmp_path / FILE)
        experts = model.hf.model.layers[1].mlp.experts
        name = "model.layers.1.block_sparse_moe.experts.{}.w{}.weight"
        assert torch.equal(experts.gate_up_proj[10], torch.cat([stored[name.format(10, w)] for w in (1, 3)]))
        assert torch.equal(experts.down_proj[2], stored[name.format(2, 2)])
        again = without_values("mixtral", **overrides)
        load_hf(again, tmp_path)
        assert same_state(again, model)

    @pytest.mark.parametrize(
        ("name", "edit"), [("gpt2", strip), ("llama", age), ("qwen3_tied", twice), ("qwen3_tied", moved)]
    )
    def test_other_names_of_the_same_tensors_are_known(self, changed, caplog, name: str, edit):
        assert same_state(loaded(name, changed(name, edit)), trained(name))
        assert not caplog.messages

    @pytest.mark.parametrize(
        ("name", "tensor", "kind"),
        [
            ("qwen3_next", "mtp.norm.weight", "Qwen3NextForCausalLM"),
            # As in the files of Llama 4, whose text model is another class.
            ("llama", "vision_model.class_embedding", "LlamaForCausalLM"),
        ],
    )
    def test_tensors_that_transformers_leaves_out_are_told(
        self, changed, caplog: pytest.LogCaptureFixture, name: str, tensor: str, kind: str
    ):
        folder = changed(name, lambda t: t.update({tensor: torch.ones(16)}))
        assert same_state(loaded(name, folder), trained(name))
        (message,) = caplog.messages
        assert message.endswith(f" has {tensor}, which {kind} lacks: not trained, not exported")


EXPERT = "model.layers.0.block_sparse_moe.experts.3.w1.weight"


class TestRefuses:
    @pytest.mark.parametrize(
        ("name", "edit", "message"),
        [
            ("qwen3", lambda t: t.pop("model.norm.weight"), r"lacks tensor model\.norm\.weight: choose"),
            ("qwen3", lambda t: t.pop("lm_head.weight"), r"lacks tensor lm_head\.weight: choose"),
            ("qwen3", lambda t: t.update(more=torch.ones(2)), "has tensor more, which the model lacks"),
            (
                "qwen3",
                lambda t: t.update({"model.norm.weight": torch.ones(3)}),
                r"model\.norm\.weight has shape \(3,\), but the model's has \(16,\)",
            ),
            (
                "qwen3",
                lambda t: t.update({"model.norm.weight": torch.ones(16, dtype=torch.int8)}),
                r"model\.norm\.weight has dtype I8, which cannot be converted",
            ),
            (
                "qwen3_tied",
                lambda t: t.update({"lm_head.weight": torch.ones(40, 16)}),
                r"model\.embed_tokens\.weight and lm_head\.weight differ",
            ),
            ("gpt2", lambda t: t.update({"wte.weight": torch.ones(40, 16)}), r"are both transformer\.wte\.weight"),
            (
                "mixtral",
                lambda t: t.pop(EXPERT),
                r"\(and 6 more\) (become|cannot be converted to) model\.layers\.0\.mlp\.experts\.gate_up_proj",
            ),
            (
                "mixtral",
                lambda t: t.update({EXPERT: torch.ones(32, 15)}),
                r"\(and 7 more\) cannot be converted to model\.layers\.0\.mlp\.experts\.gate_up_proj",
            ),
            (
                "mixtral",
                lambda t: t.update({EXPERT: torch.ones(32, 16, dtype=torch.int8)}),
                r"experts\.3\.w1\.weight has dtype I8: use a checkpoint that is not quantised",
            ),
            (
                "mixtral",
                lambda t: t.update({f"{EXPERT[:-11]}{4}.w{w}.weight": torch.ones(32, 16) for w in (1, 3)}),
                r"\(and 9 more\) become .*gate_up_proj with shape \(5, 64, 16\), but the model's has \(4, 64, 16\)",
            ),
            (
                "mixtral",
                lambda t: [t.pop(key) for key in list(t) if ".1.block_sparse_moe.experts" in key],
                r"lacks tensor model\.layers\.1\.mlp\.experts\.gate_up_proj \(and 1 more\)",
            ),
        ],
    )
    def test_a_checkpoint_that_does_not_fit_leaves_the_model(self, changed, name: str, edit, message: str):
        model = tiny(name)
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        with pytest.raises(ValueError, match=message) as caught:
            load_hf(model, changed(name, edit))
        assert "\n" not in str(caught.value)
        assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())

    def test_a_folder_that_is_not_there(self, tmp_path: Path):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            load_hf(tiny("gpt2"), tmp_path / "none")

    def test_a_model_without_memory(self, tmp_path: Path):
        save_hf(tiny("gpt2"), tmp_path)
        for use in (lambda model: load_hf(model, tmp_path), lambda model: save_hf(model, tmp_path / "b")):
            with pytest.raises(ValueError, match="is on the meta device: allocate its memory"):
                use(tiny("gpt2", "meta"))

"""An exported run: a model of its library with the same outputs and what it came with, or an adapter of peft."""

import json
from pathlib import Path

import diffusers
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from models.adapter_files import adapter_tensors
from models.adapters import Dora, inject
from models.diffusion import build_diffusion
from models.weights import load_weights
from tests.models.helpers.saving import save_adapter
from tests.models.helpers.unets import UNET as TINY_UNET
from tests.test_any_model import COMMON, GPT2, UNET
from tests.training.helpers.in_process import TINY_RUN, components_of, composed, saved_run
from tests.training.helpers.pretrained_folder import SIZES, STOPS, save_pretrained
from training.data.library_tokenizer import files_in
from training.errors import UserError
from training.saved_runs.export import adapter_files, companions, export, files_of
from training.saved_runs.finding import load_model
from training.settle.components import Components, acquired, attached
from training.weights.adapter import RunAdapter
from training.weights.filling import fill_buffers

TEXT = ("dataset=stdlib", "dataset.max_tokens=20000")
RUNS = {
    "llama": (*TINY_RUN, *TEXT, "model.tie_word_embeddings=true"),
    "transformers": (*COMMON, *GPT2, *TEXT, "precision=fp32"),
    "diffusers": (*COMMON, *UNET, "precision=fp32"),
}
ADAPTED = ("adapter=lora", "adapter.rank=2")
OF_EXPERTS = "hidden_size:16,intermediate_size:32,num_hidden_layers:2,num_attention_heads:4,num_key_value_heads:2"
MIXTRAL = f"model.overrides={{{OF_EXPERTS},num_local_experts:4,num_experts_per_tok:2,vocab_size:257}}"
EXPERTS = ("model=hf", "model.source=mixtral", MIXTRAL, "adapter.experts=true")
# Runs that train an adapter.
ADAPTER_RUNS = {
    "llama": (*TINY_RUN, *TEXT),
    "transformers": RUNS["transformers"],
    "experts": (*COMMON, *EXPERTS, *TEXT, "precision=fp32"),
}
TRAINED = ("steps=2", "checkpoint.every=2", "optimizer.lr=0.1")
IDS = torch.tensor([[100, 101, 102, 32, 10]])


LLAMA = tuple(f"model.{key}={value}" for key, value in SIZES.items() if key != "max_position_embeddings")


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run that was saved, and the name of its library."""
    overrides = (*RUNS[request.param], "steps=2", "checkpoint.every=1", "offload=bounce_linear")
    return request.param, saved_run(tmp_path_factory.mktemp(request.param), *overrides)


def own_output(library: str, folder: Path) -> torch.Tensor:
    """The logits, or the predicted velocity, of the model as the loop has it."""
    config, invocation = composed(*RUNS[library], "offload=none", run_dir=folder)
    components = Components.of(config, invocation, torch.device("cpu"))
    with acquired(components.device) as streams, attached(components, streams) as found, torch.no_grad():
        model = found.model
        fill_buffers(model)
        load_weights(model, folder / "checkpoints" / "step-00000002")
        return output(library, model.eval() if library == "llama" else next(model.children()).eval())


def output(library: str, model: nn.Module) -> torch.Tensor:
    if library != "diffusers":
        found = model(IDS)
        return getattr(found, "logits", found)
    images = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return model(images, torch.tensor([3.0, 500.0]), class_labels=torch.tensor([0, 3]), return_dict=False)[0]


@pytest.mark.parametrize("max_shard_bytes", [2**30, 4000])
@pytest.mark.slow
def test_the_library_reads_what_was_trained(run: tuple[str, Path], tmp_path: Path, max_shard_bytes: int):
    library, folder = run
    names = export(str(folder), str(tmp_path / "out"), [], max_shard_bytes)
    assert names == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert (sum(name.endswith(".safetensors") for name in names) > 1) == (max_shard_bytes == 4000)
    if library == "diffusers":
        model = diffusers.UNet2DModel.from_pretrained(tmp_path / "out")
    else:
        model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
        assert not any(report.values()), report
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert tokenizer("def").input_ids == [100, 101, 102]
        assert model.config.eos_token_id == tokenizer.eos_token_id == 256
    with torch.no_grad():
        found, expected = output(library, model.eval()), own_output(library, folder)
    if library == "llama":
        assert isinstance(model, LlamaForCausalLM)
        # Its attention adds in another order.
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(run: tuple[str, Path], tmp_path: Path):
    library, folder = run
    sizes = {
        "llama": ["model.hidden_size=32"],
        "transformers": ["model.overrides={n_embd: 64}"],
        "diffusers": ["model.overrides={block_out_channels: [16, 16]}"],
    }
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for out, overrides, problem in (
        ("out", sizes[library], "choose the model that it was saved from"),
        ("full", [], "full is not empty: give a new folder"),
        ("full/mine/out", [], r"mine/out cannot be written \(Not a directory\): give another place"),
    ):
        with pytest.raises(UserError, match=problem) as refusal:
            export(str(folder), str(tmp_path / out), overrides)
        assert "\n" not in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_model_of_no_library_is_refused():
    config, _ = composed(*TINY_RUN)
    with pytest.raises(UserError, match="Linear is the model of no library"):
        files_of(nn.Linear(2, 2), config, lambda name: torch.empty(0), 2**30)


def test_quantised_weights_are_refused_in_one_line(tmp_path: Path):
    overrides = (*TINY_RUN, "steps=1", "checkpoint.every=1", "quantize=int8", "offload=none")
    saved_run(tmp_path / "run", *overrides)
    with pytest.raises(UserError, match="its weights are quantised, in a form that no library loads: begin a run"):
        export(str(tmp_path / "run"), str(tmp_path / "out"), [])
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module", params=ADAPTER_RUNS)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A run that was saved, and the logits of its model as the loop has it."""
    overrides = (*ADAPTED, *ADAPTER_RUNS[request.param], *TRAINED, "offload=bounce_linear")
    folder = saved_run(tmp_path_factory.mktemp(request.param), *overrides)
    config, invocation = composed(*overrides, run_dir=folder)
    components = Components.of(config, invocation, torch.device("cpu"))
    with acquired(components.device) as streams, attached(components, streams) as found, torch.no_grad():
        model = found.model
        fill_buffers(model)
        load_model(model, folder / "checkpoints" / "step-00000002", config, components.device)
        logits = getattr(model, "hf", model).eval()(IDS)
    return folder, getattr(logits, "logits", logits)


@pytest.mark.slow
def test_it_is_merged_on_request_and_has_the_same_outputs(adapted: tuple[Path, torch.Tensor], tmp_path: Path):
    folder, expected = adapted
    assert "model.safetensors" in export(str(folder), str(tmp_path / "merged"), [], merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_merged_model_has_the_buffers_of_its_files(tmp_path: Path):
    """DeepSeek-V3, GLM 4.5 and others store what balances their experts as a buffer, Gemma 4 a scale of each layer."""
    sizes = f"{OF_EXPERTS},n_routed_experts:4,num_experts_per_tok:2,moe_intermediate_size:8,vocab_size:257"
    model = ("model=hf", "model.source=glm4_moe", f"model.overrides={{{sizes}}}", *TEXT, "precision=fp32")
    folder = saved_run(tmp_path / "run", *COMMON, *model, *ADAPTED, "steps=1", "checkpoint.every=1")
    export(str(folder), str(tmp_path / "merged"), [], merge=True)
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    assert stored["model.layers.1.mlp.gate.e_score_correction_bias"].tolist() == [0.0] * 4


def test_the_adapter_alone_is_that_of_the_checkpoint(adapted: tuple[Path, torch.Tensor], tmp_path: Path):
    folder, _ = adapted
    names = export(str(folder), str(tmp_path / "adapter"), [])
    beside = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert names == ["adapter_config.json", "adapter_model.safetensors", *beside]
    for name in names[:2]:
        assert (tmp_path / "adapter" / name).read_bytes() == (folder / "checkpoints/step-00000002" / name).read_bytes()


def test_that_of_a_model_of_diffusers_has_its_scale_in_the_matrices(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    job = (*COMMON, *UNET, *ADAPTED)
    folder = saved_run(tmp_path / "run", *job, *TRAINED, "ema=0.9", "adapter.modules_to_save=[conv_in]")
    names = export(str(folder), str(tmp_path / "out"), [])
    assert names == ["adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors"]
    averages = load_file(folder / "checkpoints" / "step-00000002" / "ema.safetensors")
    # Files have the dtype of the adapter.
    own = {name: tensor.bfloat16() for name, tensor in averages.items()}
    pefts, shared = (load_file(tmp_path / "out" / name) for name in names[1:])
    # alpha / rank is 32 / 2.
    assert all(torch.equal(pefts[name], own[name] * (16 if ".lora_B." in name else 1)) for name in own)
    assert written(tmp_path / "out", names[0])["lora_alpha"] == 2
    assert len(shared) == len([name for name in own if ".lora_" in name])
    assert caplog.messages == ["pytorch_lora_weights.safetensors lacks conv_in, which peft alone reads: give --merge"]
    # It begins a run, with alpha of that run; what is of other models is named.
    extended = tmp_path / "extended.safetensors"
    save_file(shared | {"text_encoder.q_proj.lora_A.weight": torch.ones(2)}, extended)
    # It is of another adapter.
    (tmp_path / "adapter_config.json").write_text("{")
    components = components_of(*job, f"adapter.weights={extended}")
    adapter = RunAdapter.of(components.config, components.model, starts=True)
    assert caplog.messages[-1].endswith("text_encoder.q_proj.lora_A.weight left out, of a text encoder")
    components.model.to_empty(device="cpu")
    adapter.fill(components.model, torch.device("cpu"))
    assert all(torch.equal(tensor, own[name]) for name, tensor in adapter_tensors(components.model).items())


def test_that_comfy_reads_no_dora_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with torch.device("meta"):
        model = build_diffusion("UNet2DModel", TINY_UNET)
    inject(model, Dora(2, 4, targets=["conv1"]), torch.float32)
    save_adapter(model.to_empty(device="cpu"), tmp_path)
    assert len(adapter_files(model, tmp_path)) == 3
    assert "ComfyUI leaves its magnitudes out: give it --merge" in caplog.text


@pytest.mark.slow
def test_a_merge_of_nothing_is_refused(tmp_path: Path):
    folder = saved_run(tmp_path / "run", *ADAPTER_RUNS["llama"], *TRAINED)
    with pytest.raises(UserError, match=r"^--merge: .* trained no adapter"):
        export(str(folder), str(tmp_path / "out"), [], merge=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_quantised_base_is_not_merged_but_the_one_that_it_was_made_of(tmp_path: Path):
    folder = saved_run(tmp_path / "run", *ADAPTER_RUNS["llama"], *TRAINED, *ADAPTED, "quantize=int8")
    with pytest.raises(UserError, match=r"^--merge: the base is quantised, quantize=int8: give quantize=none, which"):
        export(str(folder), str(tmp_path / "out"), [], merge=True)
    assert not (tmp_path / "out").exists()
    # As the message says.
    assert "model.safetensors" in export(str(folder), str(tmp_path / "out"), ["quantize=none"], merge=True)


JOB = (
    *(entry for entry in TINY_RUN if not entry.startswith("model.")),
    "dataset=text",
    "steps=1",
    "checkpoint.every=1",
)
JOB = (*JOB, "precision=fp32", "optimizer.lr=0", "seq_len=16")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "chat"
    save_pretrained(folder, "llama")
    (folder.parent / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return folder


def exported(run: Path, base: Path, *overrides: str, merge: bool = False) -> Path:
    given = (*JOB, f"dataset.files={base.parent}/a.txt", *overrides)
    export(str(saved_run(run, *given)), str(run / "out"), [], merge=merge)
    return run / "out"


def written(folder: Path, name: str = "config.json") -> dict:
    return json.loads((folder / name).read_text())


def small_files(folder: Path) -> dict[str, bytes]:
    names = {*files_in(folder), "generation_config.json"}
    return {name: (folder / name).read_bytes() for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "merge"),
    [
        (("model=hf", "model.source={base}"), False),
        (("model=hf", "model.source={base}", "adapter=lora"), True),
        (("model=hf", "model.source={base}", "adapter=lora"), False),
        (("model=hf", "model.source=llama", "model.overrides={sizes}", "model.weights={base}"), False),
        ((*LLAMA, "model.weights={base}"), False),
    ],
    ids=["whole", "merged", "adapter", "type", "llama"],
)
def test_it_leaves_with_what_it_came_with_and_stops_there(
    base: Path, tmp_path: Path, overrides: tuple[str, ...], merge: bool
):
    shape = "{" + ", ".join(f"{key}: {value}" for key, value in {**SIZES, "rms_norm_eps": 1e-5}.items()) + "}"
    given = [entry.replace("{base}", str(base)).replace("{sizes}", shape) for entry in overrides]
    out = exported(tmp_path, base, *given, merge=merge)
    assert small_files(out) == small_files(base)
    whole = merge or not any("adapter" in entry for entry in given)
    if whole:
        kept = ("eos_token_id", "bos_token_id", "pad_token_id", "max_position_embeddings", "use_cache")
        assert [written(out).get(key) for key in kept] == [written(base).get(key) for key in kept]
        model = AutoModelForCausalLM.from_pretrained(out)
    else:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
        assert not (out / "config.json").exists()
    assert model.generation_config.eos_token_id == STOPS
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(base).chat_template
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    # Either token ends a text.
    original = AutoModelForCausalLM.from_pretrained(base)
    prompt = tokenizer("the quick", return_tensors="pt").input_ids
    for stop in STOPS:
        texts = []
        for made in (original, model):
            head = made.get_output_embeddings()
            # The third token, whatever was drawn before, is the one that ends a text.
            hook = head.register_forward_hook(_after(2, stop))
            texts.append(made.generate(input_ids=prompt, do_sample=False, max_new_tokens=12))
            hook.remove()
        assert torch.equal(*texts)
        assert (texts[0].shape[1], int(texts[0][0, -1])) == (prompt.shape[1] + 3, stop)


def _after(steps: int, token: int):
    count = [0]

    def changed(module, given, logits):
        logits = logits.clone()
        logits[..., list(STOPS)] = -1e9
        if count[0] == steps:
            logits[..., token] = 1e9
        count[0] += 1
        return logits

    return changed


@pytest.mark.slow
def test_a_model_from_the_seed_stops_where_its_run_ends_documents(base: Path, tmp_path: Path):
    for name, given, ends in (("bytes", (), (None, 256)), ("words", (f"dataset.tokenizer={base}",), (1, 2))):
        out = exported(tmp_path / name, base, *given)
        assert (written(out)["bos_token_id"], written(out)["eos_token_id"]) == ends
        model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id == ends[1]
        assert GenerationConfig.from_pretrained(out).eos_token_id == ends[1]
        assert written(out)["max_position_embeddings"] == 16


def test_a_dataset_without_text_takes_nothing_away(base: Path):
    config = components_of(*JOB, "model=hf", f"model.source={base}", "dataset=synthetic").config
    assert companions(config)[0] == small_files(base)


def test_a_template_of_the_run_is_that_of_the_model(base: Path, tmp_path: Path):
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    job = (*JOB, "model=hf", f"model.source={base}", "dataset=chat", "dataset.files=none.jsonl")
    own = companions(components_of(*job).config)[0]
    assert own["chat_template.jinja"] == (base / "chat_template.jinja").read_bytes()
    given = companions(components_of(*job, f"dataset.template={tmp_path}/t.jinja").config)[0]
    assert given["chat_template.jinja"] == b"{{ messages }}"
    of_bytes = companions(components_of(*JOB, "dataset=chat", "dataset.files=none.jsonl").config)[0]
    assert b"messages" in of_bytes["chat_template.jinja"]
    assert json.loads(of_bytes["generation_config.json"])["eos_token_id"] == 256

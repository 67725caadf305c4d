"""Configurations that Hydra cannot compose: one line that names the allowed values."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException
from yaml import YAMLError

from tests.training.helpers.in_process import CONF, command_here, hydra_as_before
from training.errors import UserError
from training.runs import compose_errors
from training.runs.compose_errors import explain_refusal, is_refusal


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("offload=fast", "offload=fast: there is no such option; choose from "),
        ("steps=many", "steps=many: must be a whole number"),
        ("schedule.warmup=0.03", "schedule.warmup=0.03: must be a whole number, or auto"),
        ("vram_budget=0.5", "vram_budget=0.5: must be bytes, such as 24GiB"),
        ("recompute.tile=0.5", "recompute.tile=0.5: must be a whole number of tokens, auto or null"),
        ("optimizer.eps=fast", "optimizer.eps=fast: must be a number"),
        ("adapter=qlora", "adapter=qlora: there is no such option: write adapter=lora quantize=nf4"),
        (
            "hardware=rtx2080",
            "hardware=rtx2080: there is no such option; choose from a100, a6000, auto, h100, h200, l40s, measured",
        ),
        ("plan", "plan: is not KEY=VALUE: write plan=true"),
        ("plan=perhaps", "plan=perhaps: must be true or false"),
        ("precision=fp16", "precision=fp16: choose from auto, bf16, fp32"),
        ("batch_size=null", "batch_size=null: must have a value"),
        ("tracking.tags=a", "tracking.tags=a: must be a list, such as [a]"),
        ("steps", "steps: is not KEY=VALUE, without blanks around =; put a VALUE with blanks, brackets, letters "),
        (
            "hydra.run.dir=a=b",
            "hydra.run.dir=a=b: is not KEY=VALUE, without blanks around =; put a VALUE with blanks, ",
        ),
        (
            "sample.prompt=a cat, a dog",
            "sample.prompt=a cat, a dog: several values are a sweep, one run for each: python train.py -m"
            " sample.prompt=a cat, a dog; for one text \"sample.prompt='a cat, a dog'\"",
        ),
        (
            "+experiment=quickstart",
            "experiment=quickstart: the group has an option already: write experiment=quickstart ",
        ),
        ("offload.slots=3", "offload.slots: unknown key. Options that have it: offload=bounce_linear or "),
        ("eval=true", "eval=True: has no value of its own: give one of its keys: eval.every, eval.batches"),
        ("checkpoint=10", "checkpoint=10: has no value of its own: give one of its keys: checkpoint.every, "),
        ("tracking.tags=[a,null]", "tracking.tags[1]=None: must have a value"),
        ("lr=0.1", "lr: unknown key. Did you mean optimizer.lr?"),
        ("step=3", "step: unknown key. Did you mean steps?"),
        ("seed=1,2", "seed=1,2: several values are a sweep, one run for each: python train.py -m seed=1,2"),
        ("model=Qwen/Qwen3-8B", "model=Qwen/Qwen3-8B: there is no such option; choose from diffusers, "),
        ("hydra/launcher=slurm", "hydra/launcher=slurm: there is no such option; choose from basic, process, "),
        ("eval=[1]", "eval: has no list of its own: give its keys, eval.KEY=VALUE"),
        ("~optimizer.lr", "~optimizer.lr: a key cannot be left out: give it a value, optimizer.lr=VALUE"),
        ("~checkpoint.every", "~checkpoint.every: is null or no key: leave it out, or give it a value, checkpoint."),
        ("~nothing", "~nothing: is null or no key: leave it out"),
        ("~schedule=cosine", "~schedule=cosine: is not chosen: choose an option, schedule=OPTION"),
        ("+steps=3", "+steps: the key is there already: write steps=VALUE, without +"),
        (
            "offload@offload.weights=none",
            "offload@offload.weights: offload, as chosen, has no such key. Options that have it: offload=",
        ),
    ],
)
def test_a_refusal_is_one_line(override: str, line: str):
    with initialize_config_dir(str(CONF), version_base="1.3"), pytest.raises(Exception, match=r".") as caught:
        compose("config", [override])
    assert is_refusal(caught.value)
    assert explain_refusal(caught.value).startswith(line)
    assert "\n" not in explain_refusal(caught.value)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("adapter.targets=all-linear", "adapter.targets=all-linear: write adapter.targets=null"),
        ("adapter.experts=0", "adapter.experts=0: must be true, false or shared"),
        ("offload.resident=0.5", "offload.resident=0.5: must be units (8), a share (50%), bytes or auto"),
    ],
)
def test_a_refusal_of_an_option_s_key_says_what_to_write(override: str, line: str):
    with initialize_config_dir(str(CONF), version_base="1.3"), pytest.raises(Exception, match=r".") as caught:
        compose("config", ["adapter=lora", "offload=layer_stream", override])
    assert explain_refusal(caught.value) == line


def test_an_option_of_a_sweep_that_lacks_a_key_of_the_others_starts_no_job(tmp_path: Path):
    ended = command_here("-m", "offload=layer_stream,none", "offload.slots=2", f"hydra.sweep.dir={tmp_path}")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: offload.slots: unknown key. Options that have it: offload=")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_model_of_the_hub_is_given_as_the_source_of_another_option():
    with initialize_config_dir(str(CONF), version_base="1.3"), pytest.raises(MissingConfigException) as caught:
        compose("config", ["model=Qwen/Qwen3-8B"])
    assert explain_refusal(caught.value).endswith("; by its name or folder: model=hf model.source=Qwen/Qwen3-8B")


def test_a_broken_file_is_named_as_such():
    error = YAMLError("while scanning\n  x.yaml, line 3")
    assert is_refusal(error)
    assert explain_refusal(error) == "a configuration file is not YAML: while scanning x.yaml, line 3"


def raising(error: BaseException):
    def main() -> None:
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (YAMLError("bad"), 1, "error: a configuration file is not YAML: bad"),
        (YAMLError("\x1b[2J\u202e"), 1, r"error: a configuration file is not YAML: \x1b[2J\u202e"),
        (UserError("steps=0: must be at least 1"), 1, "error: steps=0: must be at least 1"),
        (
            PermissionError(13, "Permission denied", "/x"),
            1,
            "error: /x: cannot be written (Permission denied): choose a",
        ),
        (KeyboardInterrupt(), 130, "error: interrupted"),
    ],
)
def test_what_main_raises_ends_the_process(capsys: pytest.CaptureFixture[str], error, status: int, line: str):
    with hydra_as_before(), pytest.raises(SystemExit) as ended:
        compose_errors.run(raising(error))
    assert ended.value.code == status
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith(line)


def test_hydra_full_error_lets_it_through(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with hydra_as_before(), pytest.raises(YAMLError):
        compose_errors.run(raising(YAMLError("bad")))

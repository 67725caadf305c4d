"""Makes a tiny latent pipeline of diffusers, and drawn shapes with captions to train it on: for experiment=pictures.

    python scripts/tiny_pipeline.py shapes
    python train.py experiment=pictures

FOLDER/pipeline has a StableDiffusionPipeline. Its VAE learns the shapes here, in a minute on a CPU; its text
encoder has random values, which tell captions apart; its UNet is for train.py. FOLDER/pictures has NAME.png and
NAME.txt.
"""

import argparse
import logging
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.runs import starting

if __name__ == "__main__":
    starting.refuse_foreign_python()
    starting.end_on_interrupt()
    from models.quiet_imports import import_quantisers

    import_quantisers()
    # Libraries remark on what they lack as they are imported.
    logging.disable(logging.WARNING)

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image, ImageDraw
from tokenizers import pre_tokenizers
from torch import Tensor

from models.quiet_imports import hide_bars
from models.whole_folder import refuse_present
from training.errors import as_user_error
from training.runs import compose_errors, console

SIZE = 32
COLOURS = ("red", "green", "blue", "yellow")
SHAPES = ("circle", "square", "triangle")


def draw(folder: Path, count: int) -> Tensor:
    """Writes `count` pictures with captions; returns them, float32 [count, 3, SIZE, SIZE] from -1 to 1."""
    folder.mkdir(parents=True)
    numbers, pictures = random.Random(0), []
    for index in range(count):
        colour, shape = COLOURS[index % len(COLOURS)], SHAPES[index % len(SHAPES)]
        picture, edge = Image.new("RGB", (SIZE, SIZE), "white"), numbers.randint(18, 22)
        left, top = ((SIZE - edge) // 2 + numbers.randint(-2, 2) for _ in range(2))
        box, pen = (left, top, left + edge, top + edge), ImageDraw.Draw(picture)
        if shape == "triangle":
            pen.polygon([(left + edge // 2, top), (left, top + edge), (left + edge, top + edge)], colour)
        else:
            (pen.ellipse if shape == "circle" else pen.rectangle)(box, colour)
        picture.save(folder / f"{index:03}.png")
        (folder / f"{index:03}.txt").write_text(f"a {colour} {shape}")
        pictures.append(torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 127.5 - 1)
    return torch.stack(pictures)


def learnt_vae(pictures: Tensor, steps: int) -> diffusers.AutoencoderKL:
    """Returns a VAE that halves both sides of `pictures`, trained on them."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = diffusers.AutoencoderKL(block_out_channels=(16, 32), norm_num_groups=8, sample_size=SIZE, **blocks)
    optimizer = torch.optim.AdamW(vae.parameters(), 2e-3)
    for _ in range(steps):
        some = pictures[torch.randint(len(pictures), (8,))]
        found = vae.encode(some).latent_dist
        loss = (vae.decode(found.sample()).sample - some).abs().mean() + 1e-4 * found.kl().mean() / found.mean[
            0
        ].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        vae.register_to_config(scaling_factor=1 / float(vae.encode(pictures).latent_dist.mean.std()))
    return vae


def pipeline_of(vae: diffusers.AutoencoderKL) -> diffusers.StableDiffusionPipeline:
    """Returns the pipeline around a VAE. A token of a caption is a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    ends = {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = transformers.CLIPTextConfig(vocab_size=len(tokens), max_position_embeddings=24, **sizes, **ends)
    vocab = {token: number for number, token in enumerate(tokens)}
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    unet = {"sample_size": SIZE // 2, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
    schedule = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}
    return diffusers.StableDiffusionPipeline(
        vae=vae,
        text_encoder=transformers.CLIPTextModel(text),
        tokenizer=transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=24),
        unet=diffusers.UNet2DConditionModel(cross_attention_dim=64, attention_head_dim=4, **unet, **blocks),
        scheduler=diffusers.DDIMScheduler(set_alpha_to_one=False, steps_offset=1, **schedule),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a new folder, or an empty one")
    parser.add_argument("--count", type=int, default=120, help="pictures [%(default)s]")
    parser.add_argument("--vae-steps", type=int, default=300, help="steps that train the VAE [%(default)s]")
    options = parser.parse_args()
    with as_user_error(""):
        refuse_present(options.folder)
    torch.manual_seed(0)
    pictures = draw(options.folder / "pictures", options.count)
    hide_bars()
    pipeline_of(learnt_vae(pictures, options.vae_steps)).save_pretrained(options.folder / "pipeline")
    print(f"{options.folder}: pipeline, and {len(pictures)} pictures")


if __name__ == "__main__":
    starting.interrupt_as_usual()
    console.tolerate_failures()
    compose_errors.run(main)

"""Small models of classes of diffusers, and inputs for them."""

from functools import cache, partial

import torch
from torch import Tensor

from models.diffusion import CLASSES, build_diffusion
from models.diffusion_network import DiffusersNetwork, build_network
from tests.models.helpers.network_calls import Called
from tests.models.helpers.small_images import IMAGES
from tests.models.helpers.small_packed_images import PACKED_IMAGES
from tests.models.helpers.small_sounds import SOUNDS
from tests.models.helpers.small_videos import VIDEOS
from tests.offload.helpers.diffusion_architectures import POOLED_WIDTH, TEXT_WIDTH

TIMES = torch.tensor([0.25, 0.75])
# By name: the class, its configuration, and the shape of its latents.
SMALL = IMAGES | PACKED_IMAGES | VIDEOS | SOUNDS
# Those that are trained without a pipeline.
OWN = [name for name, (kind, _, _) in SMALL.items() if kind in CLASSES]
TEXT = {"encoder_hidden_states": (3, TEXT_WIDTH)}
POOLED = {**TEXT, "pooled_projections": (POOLED_WIDTH,)}
WITH_IMAGE = {**TEXT, "encoder_hidden_states_image": (3, 6)}
FRAME = {"other_latents": (5, 2, 4, 4)}
# The conditions of an example where they are others than `TEXT`.
CONDITIONS: dict[str, dict[str, tuple[int, ...]]] = {
    "ace_step": {**TEXT, "context_latents": (6, 6)},
    "anyflow": WITH_IMAGE,
    "audioldm2": {**TEXT, "encoder_hidden_states_1": (3, 6)},
    "bria_fibo": {**TEXT, "text_encoder_layers": (2, 3, 6)},
    "cascade": {"clip_text_pooled": (1, POOLED_WIDTH), "clip_text": (3, TEXT_WIDTH), "clip_img": (1, POOLED_WIDTH)},
    "chronoedit": WITH_IMAGE | FRAME,
    "cogvideox_image": {**TEXT, "other_latents": (4, 2, 4, 4)},
    "cogview4_control": {**TEXT, "other_latents": (4, 8, 8)},
    "easyanimate": {**TEXT, "encoder_hidden_states_t5": (3, TEXT_WIDTH)},
    "ernie_image": {"text_bth": (3, TEXT_WIDTH)},
    "hidream": {
        "encoder_hidden_states_t5": (3, TEXT_WIDTH),
        "encoder_hidden_states_llama3": (2, 3, TEXT_WIDTH),
        "pooled_embeds": (POOLED_WIDTH,),
    },
    "hunyuan_dit": {**TEXT, "encoder_hidden_states_t5": (3, 16)},
    "hunyuan_video": POOLED,
    "hunyuan_video15": {**TEXT, "encoder_hidden_states_2": (3, 12), "image_embeds": (3, 12), **FRAME},
    "i2vgen": {**TEXT, "image_embeddings": (12,), "image_latents": (4, 3, 4, 4)},
    "kandinsky5": POOLED,
    "kandinsky5_image": POOLED | FRAME,
    "krea2": {"encoder_hidden_states": (3, 2, TEXT_WIDTH)},
    "minimax_music": {"encoder_hidden_states": (6, 12)},
    "mochi": {"encoder_hidden_states": (3, 16)},
    "motif": {**TEXT, "image_embeds": (3, 6), **FRAME},
    "prior": {"proj_embedding": (8,), "encoder_hidden_states": (3, 8)},
    "sd3": POOLED,
    "skyreels_image": WITH_IMAGE | FRAME,
    "stable_audio": {**TEXT, "global_hidden_states": (1, 8)},
    "stable_audio3": {**TEXT, "global_hidden_states": (8,)},
    "svd": {"encoder_hidden_states": (1, 12), "added_time_ids": (3,), "other_latents": (4, 3, 4, 4)},
    "unet_1d": {},
    "wan_image": WITH_IMAGE | FRAME,
    "wan_vace": {**TEXT, "control_hidden_states": (5, 2, 4, 4)},
    "z_image": {"cap_feats": (3, TEXT_WIDTH)},
}


def build(name: str, **changes: object) -> DiffusersNetwork:
    """The model of a small configuration without values, on the current default device."""
    kind, options, _ = SMALL[name]
    if name in OWN:
        return build_diffusion(kind, options | changes)
    return build_network(kind, {}, options | changes, partial(Called, name))


def small(name: str, **changes: object) -> DiffusersNetwork:
    """The model of a small configuration, in eval(), with the same weights each time, none of them all zeros."""
    torch.manual_seed(0)
    model = build(name, **changes).eval()
    for key, parameter in model.named_parameters():
        # A modulation of zeros would hide what reaches it; diffusers gives experts no values.
        if parameter.ndim > 1 and (".experts." in key or not parameter.any()):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@cache
def shapes_of(name: str) -> dict[str, tuple[int | None, ...]]:
    if name not in OWN:
        return CONDITIONS.get(name, TEXT)
    with torch.device("meta"):
        return build(name).condition_shapes


def inputs_of(name: str, tokens: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    """Random inputs for `small(name)`, with few tokens in each text."""
    generator = torch.Generator().manual_seed(1)
    condition = {}
    for key, shape in shapes_of(name).items():
        if key == "labels":
            condition[key] = torch.tensor([0, 2])
            continue
        if None in shape:
            # Latents beside the noisy ones.
            condition[key] = torch.randn(2, shape[0], *SMALL[name][2][1:], generator=generator)
            continue
        # A text is [tokens, width].
        few = shape if name not in OWN else (*(min(size, tokens) for size in shape[:-1]), shape[-1])
        condition[key] = torch.randn(2, *few, generator=generator)
    return torch.randn(2, *SMALL[name][2], generator=generator), condition

"""The calls of classes of diffusers as their pipelines make them, for models of `small_diffusion`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import diffusers
import torch
from torch import Tensor

from tests.models.helpers.small_diffusion import SMALL, TIMES, inputs_of, small

STEPS = TIMES * 1000
Arguments = dict[str, object]


def pixels(name: str) -> Tensor:
    """Height and width of two images in pixels, of 8 a latent."""
    return torch.tensor([[8.0 * side for side in SMALL[name][2][-2:]]]).expand(2, 2)


def ones(*shape: int) -> Tensor:
    return torch.ones(2, *shape, dtype=torch.bool)


def pairs(noisy: Tensor) -> Tensor:
    """Latents as sequences of patches of 2 x 2, as the pipeline of Flux packs them."""
    return diffusers.FluxPipeline._pack_latents(noisy, *noisy.shape)


def tokens(noisy: Tensor) -> Tensor:
    """Latents as sequences of single ones."""
    return noisy.flatten(2).mT


def places_of_all(noisy: Tensor) -> Tensor:
    """The places of single latents of the pipeline of Bria Fibo."""
    return diffusers.BriaFiboPipeline._prepare_latent_image_ids(2, *noisy.shape[-2:], "cpu", torch.float32)


def of_pairs(name: str, noisy: Tensor, **others: object) -> Arguments:
    """The call of a model like Flux, with the places of its pipeline."""
    rows, columns = (side // 2 for side in noisy.shape[-2:])
    image = diffusers.FluxPipeline._prepare_latent_image_ids(2, rows, columns, "cpu", torch.float32)
    made = {"hidden_states": pairs(noisy), "img_ids": image, "txt_ids": torch.zeros(3, 3), "timestep": TIMES}
    return made | others


def of_flux2(name: str, noisy: Tensor) -> Arguments:
    pipeline = diffusers.Flux2Pipeline
    patches = pipeline._patchify_latents(noisy)
    return {
        "hidden_states": pipeline._pack_latents(patches),
        "img_ids": pipeline._prepare_latent_ids(patches),
        "txt_ids": pipeline._prepare_text_ids(torch.empty(2, 3, 1)),
        "timestep": TIMES,
        "guidance": torch.full((2,), 4.0),
    }


def of_flux3(name: str, noisy: Tensor) -> Arguments:
    from diffusers.modular_pipelines.flux3 import before_denoise

    image = before_denoise._prepare_image_ids(2, 3, image_rope_scale=0.5)
    text = before_denoise.Flux3TextRoPEInputsStep._prepare_text_ids(torch.empty(2, 3, 1))
    return of_pairs(name, noisy, img_ids=image, txt_ids=text)


def of_longcat(name: str, noisy: Tensor) -> Arguments:
    from diffusers.pipelines.longcat_image.pipeline_longcat_image import prepare_pos_ids

    image = prepare_pos_ids(modality_id=1, type="image", start=(512, 512), height=2, width=3)
    return of_pairs(name, noisy, img_ids=image, txt_ids=prepare_pos_ids(num_token=3))


def of_cogvideo(name: str, noisy: Tensor) -> Arguments:
    pipeline = SimpleNamespace(transformer=small(name).network, vae_scale_factor_spatial=8)
    height, width = (8 * side for side in noisy.shape[-2:])
    make = diffusers.CogVideoXPipeline._prepare_rotary_positional_embeddings
    rotary = make(pipeline, height, width, noisy.shape[2], "cpu")
    return {"hidden_states": noisy.transpose(1, 2), "timestep": STEPS, "image_rotary_emb": rotary}


def of_allegro(name: str, noisy: Tensor) -> Arguments:
    pipeline = SimpleNamespace(transformer=small(name).network, vae_scale_factor_spatial=8)
    height, width = (8 * side for side in noisy.shape[-2:])
    make = diffusers.AllegroPipeline._prepare_rotary_positional_embeddings
    return of_steps(name, noisy, image_rotary_emb=make(pipeline, 2, height, width, noisy.shape[2], "cpu"))


def of_hunyuan_dit(name: str, noisy: Tensor) -> Arguments:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed
    from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid

    crop = get_resize_crop_region_for_grid((4, 4), 512 // 8 // 2)
    sizes = pixels(name)
    return of_steps(
        name,
        noisy,
        text_embedding_mask=ones(3),
        text_embedding_mask_t5=ones(3),
        image_meta_size=torch.cat([sizes, sizes, torch.zeros(2, 2)], dim=1),
        style=torch.zeros(2, dtype=torch.int64),
        image_rotary_emb=get_2d_rotary_pos_embed(8, crop, (4, 4), device="cpu", output_type="pt"),
    )


def of_lumina_next(name: str, noisy: Tensor) -> Arguments:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    rotary = get_2d_rotary_pos_embed_lumina(8, 384, 384, linear_factor=1.0, ntk_factor=1.0)
    made = {"encoder_mask": ones(3), "image_rotary_emb": rotary, "cross_attention_kwargs": {}}
    return {"hidden_states": noisy, "timestep": 1 - TIMES, **made}


def of_ltx(name: str, noisy: Tensor) -> Arguments:
    made = {"num_frames": 2, "height": 4, "width": 4, "rope_interpolation_scale": (8 / 25, 32, 32)}
    made["encoder_attention_mask"] = None
    return {"hidden_states": diffusers.LTXPipeline._pack_latents(noisy), "timestep": STEPS, **made}


def of_kandinsky5(name: str, noisy: Tensor) -> Arguments:
    places = [torch.arange(count) for count in (2, 2, 2)]
    made = {"visual_rope_pos": places, "text_rope_pos": torch.arange(3)}
    return {"hidden_states": noisy.permute(0, 2, 3, 4, 1), "timestep": STEPS, **made}


def of_stable_audio(name: str, noisy: Tensor) -> Arguments:
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    rotary = get_1d_rotary_pos_embed(4, 7, use_real=True, repeat_interleave_real=False)
    return {"hidden_states": noisy, "timestep": TIMES, "rotary_embedding": rotary}


def of_steps(name: str, noisy: Tensor, **others: object) -> Arguments:
    """The call of a model that takes latents as they are, and times of 1000 steps."""
    return {"hidden_states": noisy, "timestep": STEPS, **others}


def of_sample(name: str, noisy: Tensor, **others: object) -> Arguments:
    return {"sample": noisy, "timestep": STEPS, **others}


def text_of(name: str) -> Tensor:
    return inputs_of(name)[1]["encoder_hidden_states"]


def beside(name: str, noisy: Tensor, dim: int = 1) -> Tensor:
    """Latents with the other ones after their channels, which are dimension `dim` of the model's input."""
    return torch.cat([noisy.movedim(1, dim), inputs_of(name)[1]["other_latents"].movedim(1, dim)], dim=dim)


def of_flux_fill(name: str, noisy: Tensor) -> Arguments:
    both = torch.cat([pairs(noisy), pairs(inputs_of(name)[1]["other_latents"])], dim=2)
    return of_pairs(name, noisy, hidden_states=both, guidance=torch.full((2,), 3.5))


def sizes(name: str, noisy: Tensor) -> Arguments:
    found = pixels(name)
    return of_steps(name, noisy, original_size=found, target_size=found, crop_coords=torch.zeros(2, 2))


def resolution(name: str, noisy: Tensor) -> Arguments:
    return of_steps(name, noisy, added_cond_kwargs={"resolution": pixels(name), "aspect_ratio": torch.ones(2, 1)})


# What the pipeline of each class passes, besides the conditions under their own names.
CALLS: dict[str, Callable[[str, Tensor], Arguments]] = {
    "allegro": of_allegro,
    # The time is that of both ends of the step.
    "ace_step": lambda name, noisy: {"hidden_states": noisy.mT, "timestep": TIMES, "timestep_r": TIMES},
    "anyflow": lambda name, noisy: (
        {"hidden_states": noisy.transpose(1, 2)}
        | dict.fromkeys(("timestep", "r_timestep"), STEPS[:, None].repeat(1, 2))
    ),
    "audioldm2": lambda name, noisy: of_sample(name, noisy, encoder_attention_mask_1=ones(3)),
    "auraflow": lambda name, noisy: of_steps(name, noisy, timestep=TIMES),
    "bria_fibo": lambda name, noisy: of_pairs(
        name, noisy, hidden_states=tokens(noisy), img_ids=places_of_all(noisy), timestep=STEPS
    ),
    "bria": lambda name, noisy: of_pairs(name, noisy, timestep=STEPS),
    "cascade": lambda name, noisy: {"sample": noisy, "timestep_ratio": TIMES},
    "chroma": lambda name, noisy: of_pairs(name, noisy, attention_mask=ones(9)),
    "chronoedit": lambda name, noisy: of_steps(name, beside(name, noisy)),
    "cogvideox": of_cogvideo,
    "cogvideox15": of_cogvideo,
    "cogvideox_image": lambda name, noisy: of_steps(name, beside(name, noisy, 2), ofs=torch.full((1,), 2.0)),
    "cogview3": sizes,
    "cogview4": sizes,
    "cogview4_control": lambda name, noisy: sizes(name, noisy) | {"hidden_states": beside(name, noisy)},
    "consisid": lambda name, noisy: of_steps(name, noisy, hidden_states=noisy.transpose(1, 2)),
    "cosmos": lambda name, noisy: of_steps(name, noisy, timestep=TIMES),
    "easyanimate": of_steps,
    "ernie_image": lambda name, noisy: of_steps(name, noisy, text_lens=torch.tensor([3, 3])),
    "flux": lambda name, noisy: of_pairs(name, noisy, guidance=torch.full((2,), 3.5)),
    "flux2": of_flux2,
    "flux3": of_flux3,
    "flux_fill": of_flux_fill,
    "hidream": lambda name, noisy: {"hidden_states": noisy, "timesteps": STEPS},
    "hunyuan_dit": of_hunyuan_dit,
    "hunyuan_image": lambda name, noisy: of_steps(
        name, noisy, encoder_attention_mask=ones(3), guidance=torch.full((2,), 3500.0)
    ),
    "hunyuan_video": lambda name, noisy: of_steps(
        name, noisy, encoder_attention_mask=ones(3), guidance=torch.full((2,), 6000.0)
    ),
    "hunyuan_video15": lambda name, noisy: of_steps(
        name, beside(name, noisy), encoder_attention_mask=ones(3), encoder_attention_mask_2=ones(3)
    ),
    "i2vgen": lambda name, noisy: of_sample(name, noisy, fps=torch.full((2,), 16.0)),
    "kandinsky3": lambda name, noisy: of_sample(name, noisy, encoder_attention_mask=ones(3)),
    "kandinsky5": of_kandinsky5,
    "kandinsky5_image": lambda name, noisy: of_kandinsky5(name, beside(name, noisy)),
    "joyimage": of_steps,
    "krea2": lambda name, noisy: {
        "hidden_states": pairs(noisy),
        "encoder_hidden_states": text_of(name).transpose(1, 2),
        "timestep": TIMES,
        "position_ids": diffusers.Krea2Pipeline.prepare_position_ids(3, 2, 3, torch.device("cpu")),
    },
    "latte": of_steps,
    "longcat": of_longcat,
    # It continues no sound.
    "longcat_audio": lambda name, noisy: of_steps(
        name,
        noisy.mT,
        timestep=TIMES,
        encoder_attention_mask=ones(3),
        attention_mask=ones(6),
        latent_cond=torch.zeros(2, 6, 4),
    ),
    "ltx": of_ltx,
    "lumina2": lambda name, noisy: of_steps(name, noisy, timestep=1 - TIMES, encoder_attention_mask=ones(3)),
    "lumina_next": of_lumina_next,
    "minimax_music": lambda name, noisy: of_steps(
        name, noisy, timestep=1 - TIMES, encoder_hidden_states=text_of(name).mT
    ),
    "mochi": lambda name, noisy: of_steps(name, noisy, timestep=1000 * (1 - TIMES), encoder_attention_mask=ones(3)),
    "motif": lambda name, noisy: of_steps(name, beside(name, noisy), encoder_attention_mask=ones(3)),
    "nucleus": lambda name, noisy: of_steps(
        name, pairs(noisy), timestep=TIMES, img_shapes=[(1, 2, 3)] * 2, encoder_hidden_states_mask=ones(3)
    ),
    "ovis": lambda name, noisy: of_pairs(
        name, noisy, txt_ids=torch.arange(3.0)[:, None] * torch.tensor([0.0, 1.0, 1.0])
    ),
    "pixart": resolution,
    "prior": of_steps,
    "prx": lambda name, noisy: of_steps(name, noisy, timestep=TIMES),
    "qwen": lambda name, noisy: {"hidden_states": pairs(noisy), "timestep": TIMES, "img_shapes": [[(1, 2, 3)]] * 2},
    # Six tokens after the text, for four latents each.
    "qwen21": lambda name, noisy: of_steps(
        name,
        tokens(noisy),
        timestep=TIMES,
        img_shapes=[[(1, 4, 6)]] * 2,
        img_mask=torch.tensor([[False] * 3 + [True] * 6] * 2),
    ),
    # Its scale of times is 1, that of its guidance 0.1.
    "sana": lambda name, noisy: of_steps(name, noisy, guidance=torch.full((2,), 0.45)),
    "sana_video": of_steps,
    "sd3": of_steps,
    "skyreels": of_steps,
    "skyreels_image": lambda name, noisy: of_steps(name, beside(name, noisy)),
    "stable_audio": of_stable_audio,
    "stable_audio3": lambda name, noisy: of_steps(name, noisy, timestep=TIMES, encoder_attention_mask=ones(3)),
    "svd": lambda name, noisy: of_sample(name, beside(name, noisy, 2)),
    "unet_1d": lambda name, noisy: of_sample(name, noisy, timestep=TIMES),
    "unet_3d": of_sample,
    # Its text is that of each frame.
    "unet_motion": lambda name, noisy: of_sample(
        name, noisy, encoder_hidden_states=text_of(name).repeat_interleave(2, dim=0)
    ),
    "wan": of_steps,
    "wan_image": lambda name, noisy: of_steps(name, beside(name, noisy)),
    "wan_vace": of_steps,
    "z_image": lambda name, noisy: {"x": list(noisy[:, :, None]), "t": 1 - TIMES},
}
# Conditions that a model takes in another form.
FORMS: dict[str, Callable[[Tensor], object]] = {
    "context_latents": lambda latents: latents.mT,
    "encoder_hidden_states_llama3": lambda layers: layers.transpose(0, 1),
    "cap_feats": list,
    "text_encoder_layers": lambda layers: list(layers.unbind(1)),
}
# Those whose output is the velocity from noise to image.
BACKWARDS = ("hidream", "lumina2", "lumina_next", "minimax_music", "mochi", "z_image")


def back(name: str, output: object, noisy: Tensor) -> Tensor:
    """The output of a model in the layout of its latents, as its pipeline brings it there."""
    height, width = noisy.shape[-2:] if noisy.ndim > 3 else (0, 0)
    if name == "flux2":
        patches = output.transpose(1, 2).reshape(2, -1, height // 2, width // 2)
        return diffusers.Flux2Pipeline._unpatchify_latents(patches)
    if name in ("bria", "chroma", "flux", "flux3", "flux_fill", "krea2", "longcat", "nucleus", "ovis", "qwen"):
        # The pipeline's sizes are in pixels: eight a latent.
        found = diffusers.FluxPipeline._unpack_latents(output, 8 * height, 8 * width, 8)
        return found.reshape(noisy.shape)
    if name == "ltx":
        return diffusers.LTXPipeline._unpack_latents(output, *noisy.shape[2:])
    if name in ("bria_fibo", "qwen21"):
        # Of the text it is left out.
        return output[:, -height * width :].mT.reshape(noisy.shape)
    if name.startswith("cogvideox") or name in ("ace_step", "anyflow", "consisid", "longcat_audio", "svd"):
        return output.transpose(1, 2)
    if name.startswith("kandinsky5"):
        return output.permute(0, 4, 1, 2, 3)
    return torch.stack(list(output)).squeeze(2) if name == "z_image" else output[:, : noisy.shape[1]]

"""Networks of diffusers called by hand, as their pipelines call them: for tests that need every class."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import diffusers
import torch
from diffusers.models import embeddings
from torch import Tensor, nn

from models.diffusion_network import DiffusersNetwork

Arguments = dict[str, object]


@dataclass(frozen=True)
class Given:
    """Latents [B, C, ...], times [B] from 0 to 1, and conditions by name, in the dtype of the network."""

    network: nn.Module
    noisy: Tensor
    times: Tensor
    condition: dict[str, Tensor]

    @property
    def steps(self) -> Tensor:
        return self.times * 1000

    @property
    def text(self) -> Tensor:
        return self.condition["encoder_hidden_states"]

    @property
    def pairs(self) -> Tensor:
        """Latents as sequences of patches of 2 x 2, as the pipeline of Flux packs them."""
        return diffusers.FluxPipeline._pack_latents(self.noisy, *self.noisy.shape)

    @property
    def pixels(self) -> Tensor:
        """Height and width of the images in pixels, of 8 a latent."""
        return self.noisy.new_tensor([[8.0 * side for side in self.noisy.shape[-2:]]]).expand(len(self.noisy), 2)

    def full(self, value: float, *shape: int) -> Tensor:
        return self.noisy.new_full((len(self.noisy), *shape), value)

    def ones(self, tokens: int) -> Tensor:
        return torch.ones(len(self.noisy), tokens, dtype=torch.bool)

    def beside(self, dim: int = 1) -> Tensor:
        """Latents with the other ones after their channels, which are dimension `dim` of the model's input."""
        return torch.cat([each.movedim(1, dim) for each in (self.noisy, self.condition["other_latents"])], dim=dim)


class Called(DiffusersNetwork):
    """A network of `SMALL` that is called as its row in `CALLS` says."""

    def __init__(self, name: str, network: nn.Module):
        super().__init__(network)
        self._call = CALLS[name]

    def forward(self, noisy: Tensor, timestep: Tensor, **condition: Tensor) -> Tensor:
        dtype = self.network.dtype
        given = Given(self.network, noisy.to(dtype), timestep.to(dtype), self._in_own_dtype(condition))
        arguments = given.condition | self._call(given)
        # It is among the channels.
        arguments.pop("other_latents", None)
        output = self.network(**arguments, return_dict=False)
        output = output[0] if isinstance(output, tuple) else output
        return torch.stack(output) if isinstance(output, list) else output


def of_steps(given: Given, latents: Tensor | None = None, **others: object) -> Arguments:
    """The call of a model that takes times of 1000 steps."""
    return {"hidden_states": given.noisy if latents is None else latents, "timestep": given.steps} | others


def of_times(given: Given, latents: Tensor | None = None, **others: object) -> Arguments:
    """That of one that takes times from 0 to 1."""
    return of_steps(given, latents) | {"timestep": given.times} | others


def of_sample(given: Given, latents: Tensor | None = None, **others: object) -> Arguments:
    return {"sample": given.noisy if latents is None else latents, "timestep": given.steps} | others


def of_pairs(given: Given, **others: object) -> Arguments:
    """The call of a model like Flux, with the places of its pipeline."""
    rows, columns = (side // 2 for side in given.noisy.shape[-2:])
    image = diffusers.FluxPipeline._prepare_latent_image_ids(2, rows, columns, "cpu", torch.float32)
    return of_times(given, given.pairs, img_ids=image, txt_ids=torch.zeros(given.text.shape[1], 3)) | others


def of_fibo(given: Given) -> Arguments:
    image = diffusers.BriaFiboPipeline._prepare_latent_image_ids(2, *given.noisy.shape[-2:], "cpu", torch.float32)
    layers = list(given.condition["text_encoder_layers"].unbind(1))
    latents = given.noisy.flatten(2).mT
    return of_pairs(given, hidden_states=latents, img_ids=image, timestep=given.steps, text_encoder_layers=layers)


def of_flux2(given: Given) -> Arguments:
    pipeline = diffusers.Flux2Pipeline
    patches = pipeline._patchify_latents(given.noisy)
    image, text = pipeline._prepare_latent_ids(patches), pipeline._prepare_text_ids(given.text)
    return of_times(given, pipeline._pack_latents(patches), img_ids=image, txt_ids=text, guidance=given.full(4.0))


def of_flux3(given: Given) -> Arguments:
    from diffusers.modular_pipelines.flux3 import before_denoise

    image = before_denoise._prepare_image_ids(2, 3, image_rope_scale=0.5)
    return of_pairs(given, img_ids=image, txt_ids=before_denoise.Flux3TextRoPEInputsStep._prepare_text_ids(given.text))


def of_longcat(given: Given) -> Arguments:
    from diffusers.pipelines.longcat_image.pipeline_longcat_image import prepare_pos_ids

    image = prepare_pos_ids(modality_id=1, type="image", start=(512, 512), height=2, width=3)
    return of_pairs(given, img_ids=image, txt_ids=prepare_pos_ids(num_token=3))


def of_cogvideo(given: Given) -> Arguments:
    pipeline = SimpleNamespace(transformer=given.network, vae_scale_factor_spatial=8)
    height, width = (8 * side for side in given.noisy.shape[-2:])
    make = diffusers.CogVideoXPipeline._prepare_rotary_positional_embeddings
    rotary = make(pipeline, height, width, given.noisy.shape[2], "cpu")
    return of_steps(given, given.noisy.transpose(1, 2), image_rotary_emb=rotary)


def of_allegro(given: Given) -> Arguments:
    pipeline = SimpleNamespace(transformer=given.network, vae_scale_factor_spatial=8)
    height, width = (8 * side for side in given.noisy.shape[-2:])
    make = diffusers.AllegroPipeline._prepare_rotary_positional_embeddings
    return of_steps(given, image_rotary_emb=make(pipeline, 2, height, width, given.noisy.shape[2], "cpu"))


def of_hunyuan_dit(given: Given) -> Arguments:
    from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid

    crop = get_resize_crop_region_for_grid((4, 4), 512 // 8 // 2)
    return of_steps(
        given,
        text_embedding_mask=given.ones(3),
        text_embedding_mask_t5=given.ones(3),
        image_meta_size=torch.cat([given.pixels, given.pixels, given.full(0, 2)], dim=1),
        style=torch.zeros(len(given.noisy), dtype=torch.int64),
        image_rotary_emb=embeddings.get_2d_rotary_pos_embed(8, crop, (4, 4), device="cpu", output_type="pt"),
    )


def of_lumina_next(given: Given) -> Arguments:
    rotary = embeddings.get_2d_rotary_pos_embed_lumina(8, 384, 384, linear_factor=1.0, ntk_factor=1.0)
    others = {"encoder_mask": given.ones(3), "image_rotary_emb": rotary, "cross_attention_kwargs": {}}
    return of_steps(given, timestep=1 - given.times, **others)


def of_kandinsky5(given: Given, latents: Tensor | None = None) -> Arguments:
    places = {"visual_rope_pos": [torch.arange(2)] * 3, "text_rope_pos": torch.arange(3)}
    latents = given.noisy if latents is None else latents
    return of_steps(given, latents.movedim(1, -1), **places)


def of_stable_audio(given: Given) -> Arguments:
    rotary = embeddings.get_1d_rotary_pos_embed(4, 7, use_real=True, repeat_interleave_real=False)
    return of_times(given, rotary_embedding=rotary)


def of_cogview(given: Given, latents: Tensor | None = None) -> Arguments:
    sizes = {"original_size": given.pixels, "target_size": given.pixels, "crop_coords": given.full(0, 2)}
    return of_steps(given, latents, **sizes)


def of_pixart(given: Given) -> Arguments:
    return of_steps(given, added_cond_kwargs={"resolution": given.pixels, "aspect_ratio": given.full(1, 1)})


# What the pipeline of each class passes, besides the conditions under their own names.
CALLS: dict[str, Callable[[Given], Arguments]] = {
    "allegro": of_allegro,
    # The time is that of both ends of the step.
    "ace_step": lambda given: of_times(given, given.noisy.mT, timestep_r=given.times),
    "anyflow": lambda given: (
        {"hidden_states": given.noisy.transpose(1, 2)}
        | dict.fromkeys(("timestep", "r_timestep"), given.steps[:, None].repeat(1, 2))
    ),
    "audioldm2": lambda given: of_sample(given, encoder_attention_mask_1=given.ones(3)),
    "auraflow": of_times, "bria_fibo": of_fibo, "bria": lambda given: of_pairs(given, timestep=given.steps),
    "cascade": lambda given: {"sample": given.noisy, "timestep_ratio": given.times},
    "chroma": lambda given: of_pairs(given, attention_mask=given.ones(9)),
    "chronoedit": lambda given: of_steps(given, given.beside()), "cogvideox": of_cogvideo, "cogvideox15": of_cogvideo,
    "cogvideox_image": lambda given: of_steps(given, given.beside(2), ofs=torch.full((1,), 2.0)),
    "cogview3": of_cogview, "cogview4": of_cogview,
    "cogview4_control": lambda given: of_cogview(given, given.beside()),
    "consisid": lambda given: of_steps(given, given.noisy.transpose(1, 2)),
    "cosmos": lambda given: of_times(given, padding_mask=given.noisy.new_zeros(1, 1, *given.noisy.shape[-2:])),
    "dreamlite": of_sample, "easyanimate": of_steps,
    "ernie_image": lambda given: of_steps(given, text_lens=given.ones(3).sum(dim=1)),
    "flux2": of_flux2, "flux3": of_flux3,
    "hidream": lambda given: {
        "hidden_states": given.noisy, "timesteps": given.steps,
        "encoder_hidden_states_llama3": given.condition["encoder_hidden_states_llama3"].transpose(0, 1),
    },
    "hunyuan_dit": of_hunyuan_dit,
    "hunyuan_image": lambda given: of_steps(given, encoder_attention_mask=given.ones(3), guidance=given.full(3500.0)),
    "hunyuan_video": lambda given: of_steps(given, encoder_attention_mask=given.ones(3), guidance=given.full(6000.0)),
    "hunyuan_video15": lambda given: of_steps(
        given, given.beside(), encoder_attention_mask=given.ones(3), encoder_attention_mask_2=given.ones(3)
    ),
    "i2vgen": lambda given: of_sample(given, fps=given.full(16.0)),
    "kandinsky3": lambda given: of_sample(given, encoder_attention_mask=given.ones(3)),
    "kandinsky5": of_kandinsky5,
    "kandinsky5_image": lambda given: of_kandinsky5(given, given.beside()),
    "joyimage": of_steps,
    "krea2": lambda given: of_times(
        given, given.pairs, position_ids=diffusers.Krea2Pipeline.prepare_position_ids(3, 2, 3, torch.device("cpu"))
    ),
    "latte": of_steps, "longcat": of_longcat,
    # It continues no sound.
    "longcat_audio": lambda given: of_times(
        given, given.noisy.mT, encoder_attention_mask=given.ones(3), attention_mask=given.ones(6),
        latent_cond=given.full(0, 6, 4),
    ),
    "lumina2": lambda given: of_steps(given, timestep=1 - given.times, encoder_attention_mask=given.ones(3)),
    "lumina_next": of_lumina_next,
    "minimax_music": lambda given: of_steps(given, timestep=1 - given.times),
    "mochi": lambda given: of_steps(given, timestep=1000 - given.steps, encoder_attention_mask=given.ones(3)),
    "motif": lambda given: of_steps(given, given.beside(), encoder_attention_mask=given.ones(3)),
    "nucleus": lambda given: of_times(
        given, given.pairs, img_shapes=[(1, 2, 3)] * len(given.noisy), encoder_hidden_states_mask=given.ones(3)
    ),
    "ovis": lambda given: of_pairs(given, txt_ids=torch.arange(3.0)[:, None] * torch.tensor([0.0, 1.0, 1.0])),
    "pixart": of_pixart, "prior": of_steps, "prx": of_times,
    "qwen": lambda given: of_times(given, given.pairs, img_shapes=[[(1, 2, 3)]] * len(given.noisy)),
    # Six tokens after the text, for four latents each.
    "qwen21": lambda given: of_times(
        given, given.noisy.flatten(2).mT, img_shapes=[[(1, 4, 6)]] * len(given.noisy),
        img_mask=torch.tensor([[False] * 3 + [True] * 6] * len(given.noisy)),
    ),
    # Its scale of times is 1, that of its guidance 0.1.
    "sana": lambda given: of_steps(given, guidance=given.full(0.45)),
    "sana_video": of_steps, "sd3": of_steps, "skyreels": of_steps,
    "skyreels_image": lambda given: of_steps(given, given.beside()),
    "stable_audio": of_stable_audio,
    "stable_audio3": lambda given: of_times(given, encoder_attention_mask=given.ones(3)),
    "svd": lambda given: of_sample(given, given.beside(2)),
    "unet_1d": lambda given: of_sample(given, timestep=given.times),
    "unet_3d": of_sample,
    # Its text is that of each frame.
    "unet_motion": lambda given: of_sample(given, encoder_hidden_states=given.text.repeat_interleave(2, dim=0)),
    "wan": of_steps, "wan_image": lambda given: of_steps(given, given.beside()), "wan_vace": of_steps,
    "z_image": lambda given: {
        "x": list(given.noisy[:, :, None]), "t": 1 - given.times, "cap_feats": list(given.condition["cap_feats"]),
    },
}  # fmt: skip

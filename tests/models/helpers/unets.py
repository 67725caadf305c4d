"""The configuration of a tiny UNet of diffusers, on which tests build."""

UNET = {
    "sample_size": 8,
    "in_channels": 1,
    "out_channels": 1,
    "block_out_channels": [8, 16],
    "down_block_types": ["DownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "UpBlock2D"],
    "norm_num_groups": 4,
    "layers_per_block": 1,
}

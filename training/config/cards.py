"""GPUs to plan for on any machine: the options of `hardware` beside those of its folder."""

from dataclasses import dataclass

MEASURED = "preset, measured"
ESTIMATED = "preset, estimated from data sheets"


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet, in the host that is assumed for it; its FLOP/s are in training/profiling/hardware.py.

    `vram_gib` is what a program can have. `memory_gb_s` is the rate of its memory, `pcie` its generation, of 16 lanes.
    """

    name: str
    vram_gib: float
    memory_gb_s: float
    pcie: int
    host_gib: float = 128
    update_gparams_s: float = 3.0

    def figures(self) -> dict[str, str | float]:
        """Returns what a plan needs besides FLOP/s. Copies on the device reach 85% of the data sheet."""
        alone, both = {4: (25, 22), 5: (55, 50)}[self.pcie]
        return {
            "name": self.name,
            "source": ESTIMATED,
            "vram_gib": self.vram_gib,
            "host_gib": self.host_gib,
            "h2d_gb_s": alone,
            "d2h_gb_s": alone,
            "both_gb_s": both,
            "update_gparams_s": self.update_gparams_s,
            "device_gb_s": 0.85 * self.memory_gb_s,
        }


# A desktop of 64 GiB, of which a run can have 60, with two channels of DDR5.
DESKTOP = {"host_gib": 60, "update_gparams_s": 1.8}
# Sources: NVIDIA's whitepapers of Ampere GA102 (3090, A6000), Ada (4090) and RTX Blackwell (5090), and its data sheets
# of A100 80GB SXM, H100 SXM and L40S.
CARDS = {
    "rtx3090": Card("RTX 3090", 23.5, 936, 4, **DESKTOP),
    "rtx4090": Card("RTX 4090", 23.5, 1008, 4, **DESKTOP),
    "rtx5090": Card("RTX 5090", 31.3, 1792, 5, **DESKTOP),
    "a6000": Card("RTX A6000", 47.4, 768, 4),
    "l40s": Card("L40S", 44.4, 864, 4),
    "a100": Card("A100 80GB", 79, 2039, 4),
    "h100": Card("H100 80GB", 79, 3350, 5),
}
# With 16 cores, measured with this repository (docs/log.md) but for three estimates: fp32 is 57% of the data sheet's
# peak without TF32, copies on the device reach 4 of its 4.8 TB/s, and NVLink 80% of 450 GB/s each way.
H200 = {
    "name": "H200", "source": MEASURED, "vram_gib": 139, "host_gib": 125, "h2d_gb_s": 55.2, "d2h_gb_s": 55.0,
    "both_gb_s": 50.4, "bf16_tflops": 566, "fp32_tflops": 38, "update_gparams_s": 4.5, "device_gb_s": 4000,
    "links_gb_s": 360, "attention_tflops": 478,
}  # fmt: skip
PRESETS: dict[str, dict[str, str | float]] = {"h200": H200} | {name: card.figures() for name, card in CARDS.items()}

"""AdamW with its states on the host, and updates that run beside the step.

Read `adamw` first, then `formats` (how states are held), `kernels` (the arithmetic) and `overlap`, which hides updates
behind the step on the device, or with a thread (`worker`).
"""

"""Pipelines of diffusers: a network with its VAE, its text encoders and its scheduler.

Read `recording` first: with what a pipeline calls its network is asked of the pipeline, and not known here. Then
`calls` (what is made of the records), and `model`.
"""

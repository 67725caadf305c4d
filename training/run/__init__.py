"""A run from its configuration to its last step: `prepare`, `build`, `loop`. `follow` is any rank but the first."""

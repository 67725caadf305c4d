"""Models in plain PyTorch; how their parameters are initialised, loaded and saved."""

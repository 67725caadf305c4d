"""The offload engine: training with weights, gradients and activations that live in host memory."""

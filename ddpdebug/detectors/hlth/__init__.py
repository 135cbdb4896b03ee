"""Rules about the signals of training: losses, gradients, weights and activations over time. Torch-free."""

"""Compares training with PyTorch: a catalogue of architectures, losses and layers, and the comparison itself."""

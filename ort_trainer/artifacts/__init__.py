"""Artifacts for training on a device."""

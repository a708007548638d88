"""The training loop and all that it counts and keeps."""

"""What a model and its loss read and leave outside tensors: places, their values, and the recording of both."""

"""One graph of forward and backward pass: differentiated, with random inputs, recomputed and divided."""

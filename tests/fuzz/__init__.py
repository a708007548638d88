"""A fuzzer that draws models, trains them here and in PyTorch, and shrinks what differs: ``make fuzz``."""

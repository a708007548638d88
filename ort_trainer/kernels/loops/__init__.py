"""What lies between PyTorch's products and convolutions, as loops that Inductor compiles."""

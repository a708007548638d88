"""Turns the user's model into training graphs: captured, differentiated, lowered to kernels, checked, kept on disk."""

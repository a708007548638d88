"""Runs the tests: which of them, in what order, by which command, and where their time goes."""

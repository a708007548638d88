"""How the tests are run: which of them, in what order, by which command, and where their time goes."""

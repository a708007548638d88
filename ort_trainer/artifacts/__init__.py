"""Writes the artifacts from which ``ort_trainer.api`` trains: models of step, evaluation and update, and a checkpoint."""

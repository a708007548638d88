"""Writes what ``ort_trainer.api`` trains from: models of step, evaluation and update, and a checkpoint."""

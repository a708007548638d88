"""The former place of ``ort_trainer.export``, for the import path of ``register_gradient``."""

"""Settings: the trainer's options and the model description, checked against the schemas."""

from .model_desc import InputDescription, ModelDescription, OutputDescription
from .sections import OptionsDict
from .trainer_options import ORTTrainerOptions

__all__ = ["InputDescription", "ModelDescription", "ORTTrainerOptions", "OptionsDict", "OutputDescription"]

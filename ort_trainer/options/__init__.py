"""Settings: the trainer's options and the model description, checked against the schemas."""

from typing import TYPE_CHECKING

from ..core.lazy import lazily

if TYPE_CHECKING:
    from .model_desc import InputDescription, ModelDescription, OutputDescription
    from .sections import OptionsDict
    from .trainer_options import ORTTrainerOptions

__all__ = ["InputDescription", "ModelDescription", "ORTTrainerOptions", "OptionsDict", "OutputDescription"]

# Lazy, because `ort-trainer options` needs no torch.
__getattr__, __dir__ = lazily(
    __name__,
    {
        "InputDescription": "model_desc",
        "ModelDescription": "model_desc",
        "ORTTrainerOptions": "trainer_options",
        "OptionsDict": "sections",
        "OutputDescription": "model_desc",
    },
)

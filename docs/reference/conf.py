"""Settings of Sphinx for the API reference, which ``make reference`` builds from the docstrings."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

project = "ort_trainer"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "alabaster"
html_theme_options = {"description": "Train PyTorch models on ONNX Runtime", "fixed_sidebar": True}
html_show_copyright = False
html_copy_source = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_use_ivar = True  # attributes that are properties too are not described twice

"""Settings of the documentation site: `python -m sphinx -W docs docs/_build`."""

import inspect
import os
import re
import sys
import types

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # importing modules for the API reference needs no accelerator

project = "jaxgpt"
author = "the jaxgpt authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
html_theme = "sphinx_book_theme"
html_title = "jaxgpt"
html_theme_options = {"show_toc_level": 2, "navbar_persistent": []}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_last_updated_fmt = None  # the same sources give the same pages

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # tests/test_lessons.py runs the lessons; here they are rendered as they are

suppress_warnings = ["ref.python"]  # a name in a signature that several modules have: `Log`, `dtype`
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_preserve_defaults = True
# Packages of extras that documented modules import at their top: the site builds without them, the same everywhere.
autodoc_mock_imports = ["lm_eval", "prometheus_client", "starlette", "uvicorn"]
# A mocked decorator would hide the class that it decorates, and a mocked base class the arguments of its subclass.
sys.modules["lm_eval.api.registry"] = types.SimpleNamespace(register_model=lambda name: lambda cls: cls)
sys.modules["lm_eval.api.model"] = types.SimpleNamespace(LM=type("LM", (), {"__module__": "lm_eval.api.model"}))
napoleon_google_docstring = True


def shorten(app, what, name, object_, options, signature, returns):
    """Drop linen's own fields from a signature, and the form in which Python prints defaults and paths of types."""
    if signature is not None:
        signature = re.sub(r", parent: .*?, name: str \| None = None", "", signature)
        signature = re.sub(r"<(?:function|class|factory) ?'?([\w.]*).*?>", r"\1", signature)
        signature = re.sub(r"~?\b(?:\w+\.)+(?=[A-Za-z_])", "", signature)
    return signature, returns and re.sub(r"~?\b(?:\w+\.)+(?=[A-Za-z_])", "", returns)


def skip_field(app, what, name, object_, skip, options):
    """Skip a field whose default is a function of a module, which autodoc takes for a method of the class."""
    is_field = (
        what == "class"
        and (inspect.isfunction(object_) or inspect.isbuiltin(object_))
        and "." not in object_.__qualname__
    )
    return True if is_field else None  # None: let others decide


def setup(app):
    app.connect("autodoc-skip-member", skip_field)
    app.connect("autodoc-process-signature", shorten)

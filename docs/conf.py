"""Settings of the documentation site: `python -m sphinx -W docs docs/_build`."""

import inspect
import os
import re
import sys
import tomllib
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "api"))
sys.path.insert(0, str(Path(__file__).parent.parent / "experiments" / "post"))  # which api/post.md documents
import fields  # api/fields.py
from sphinx.addnodes import pending_xref
from sphinx.domains.python import PyXRefRole

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # importing modules for the API reference needs no accelerator

project = "jaxgpt"
author = "the jaxgpt authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
html_theme = "sphinx_book_theme"
html_title = "jaxgpt"
html_theme_options = {"show_toc_level": 2, "navbar_persistent": []}
urls = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"].get("urls", {})
if "Repository" in urls:
    html_theme_options |= {"repository_url": urls["Repository"], "use_repository_button": True}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_last_updated_fmt = None  # the same sources give the same pages

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # tests/test_lessons.py runs the lessons; here they are rendered as they are

suppress_warnings = ["ref.python"]  # a name in a signature that several modules have: `Log`, `dtype`
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"special-members": "__call__", "no-value": True}
default_role = "py:reference"  # a name in backticks
autodoc_preserve_defaults = True
# Packages of extras that documented modules import at their top: the site builds without them, the same everywhere.
autodoc_mock_imports = ["lm_eval", "prometheus_client", "starlette", "uvicorn"]
# A mocked decorator would hide the class that it decorates, and a mocked base class the arguments of its subclass.
sys.modules["lm_eval.api.registry"] = types.SimpleNamespace(register_model=lambda name: lambda cls: cls)
sys.modules["lm_eval.api.model"] = types.SimpleNamespace(LM=type("LM", (), {"__module__": "lm_eval.api.model"}))
napoleon_google_docstring = True


def add_fields(app, what, name, object_, options, lines):
    """Add a list of a class's fields to its docstring."""
    if what == "class" and fields.find_fields(object_):
        lines += ["", *fields.list_fields(object_), ""]


def shorten(app, what, name, object_, options, signature, returns):
    """Drop the signature of a class that has a list of fields, and the paths of types from the others."""
    if signature is None:
        return None
    if what == "class" and (found := fields.find_fields(object_)):
        names = [field.name for field in found]
        return f"({', '.join(names)})" if hasattr(object_, "_fields") else "", None
    signature = re.sub(r"Annotated\[([^,]*), [\w.]*Interval\(.*?\)\]", r"\1", signature)
    signature = fields.shorten_paths(re.sub(r"<(?:function|class|factory) ?'?([\w.]*).*?>", r"\1", signature))
    return signature, returns and fields.shorten_paths(returns)


def skip_member(app, what, name, object_, skip, options):
    """Skip fields, which the list has, and what linen and Flax call or add."""
    is_field = (
        what == "class"
        and (inspect.isfunction(object_) or inspect.isbuiltin(object_))
        and "." not in object_.__qualname__
    )
    is_field = is_field or inspect.isclass(object_) or type(object_).__name__ == "_tuplegetter"
    return True if is_field or name in ("setup", "replace") else None  # None: let others decide


def list_number_types(app, docname, source):
    """Put a table of the types of numbers where a page has {{number types}}."""
    if "{{number types}}" in source[0]:
        source[0] = source[0].replace("{{number types}}", "\n".join(fields.list_number_types()))


def link_lessons(app, doctree):
    """Let lessons link to each other: docs/lessons is a link to a folder outside of docs/, which MyST resolves."""
    for node in doctree.findall(pending_xref):
        _, found, page = node["reftarget"].partition("/experiments/lessons/")
        node["reftarget"] = f"lessons/{page}" if found else node["reftarget"]


def find_source(app, module, attribute):
    """Show the source of an alias such as `Params`, a dict, where it is defined: the site has no page of builtins."""
    value = getattr(sys.modules[module], attribute, None)
    return None if value is None or str(getattr(value, "__module__", "")).startswith("jaxgpt.") else module


class ReferenceRole(PyXRefRole):
    """Show a name in backticks as code, with a link where the reference has it. A class may be in any module."""

    def process_link(self, env, refnode, has_explicit_title, title, target):
        title, target = super().process_link(env, refnode, has_explicit_title, title, target)
        refnode["reftype"], refnode["refspecific"] = "obj", refnode.get("refspecific") or target[:1].isupper()
        return title, target


def setup(app):
    app.add_role_to_domain("py", "reference", ReferenceRole())
    app.connect("viewcode-follow-imported", find_source)
    app.connect("source-read", list_number_types)
    app.connect("doctree-read", link_lessons)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-process-docstring", add_fields)

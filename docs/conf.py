"""How the site is built: ``make docs``. No network is needed, and warnings are errors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE / "_ext")]

import backpack_core  # noqa: E402

project = "backpack-core"
author = "The backpack-core authors"
copyright = author
release = version = backpack_core.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "api_pages",
    "further_pages",
    "mathml",
    "outside_links",
    "tables",
]
root_doc = "index"
exclude_patterns = ["_build", "_ext", "gallery/**/*.ipynb", "gallery/**/*.py", "gallery/*.json"]
suppress_warnings = ["toc.empty_glob", "config.cache"]
nitpicky = False

# -- Markdown ------------------------------------------------------------------------------------
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist", "attrs_block"]
myst_heading_anchors = 4
pygments_style, pygments_dark_style = "friendly", "native"
highlight_language = "default"

# -- API -----------------------------------------------------------------------------------------
autodoc_member_order = "bysource"
toc_object_entries = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
autodoc_inherit_docstrings = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar = True
napoleon_custom_sections = [("Class attributes", "params_style")]
default_role = "code"
add_module_names = False

# -- gallery -------------------------------------------------------------------------------------
# BACKPACK_GALLERY=0 leaves the scripts unexecuted: pages without pictures, in seconds.
_runs = os.environ.get("BACKPACK_GALLERY", "1") != "0"
sphinx_gallery_conf = {
    "examples_dirs": ["../examples/gallery"],
    "gallery_dirs": ["gallery"],
    "filename_pattern": r"/plot_",
    "plot_gallery": _runs,
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "min_reported_time": 60,
    "write_computation_times": False,
    "show_memory": False,
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": ("matplotlib",),
    "matplotlib_animations": False,
    "reset_modules": ("matplotlib", "gallery_reset.begin"),
    "thumbnail_size": (400, 280),
    "notebook_images": False,
    "show_signature": False,
}

# -- looks ---------------------------------------------------------------------------------------
html_theme = "furo"
html_title = "backpack-core"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e63", "color-brand-content": "#0b6e63"},
    "dark_css_variables": {"color-brand-primary": "#5cc8b8", "color-brand-content": "#5cc8b8"},
    "navigation_with_keys": True,
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

"""edgemoe-convert: a stacked Mixture-of-Experts GGUF becomes a package with one file per expert.

Layers, lowest first: errors, source (reads GGUF headers), pieces (copies and compares bytes), layout (what goes
where), tasks (threads and progress), verify and writer, conversion, cli. docs/formats.md is the format.
"""

from .conversion import Report, convert
from .errors import ConvertError

__all__ = ["ConvertError", "Report", "convert"]

"""What edgemoe raises. Each message is one line: where, found, wanted."""


class EdgemoeError(Exception):
    """Base of all of edgemoe's own exceptions."""


class ModelError(EdgemoeError, ValueError):
    """A model that cannot be opened or loaded. Also a ValueError, since that is what llama_cpp.Llama raises then."""


class ModelFault(EdgemoeError, RuntimeError):
    """A loaded model whose last results are worthless: a file was cut, the process was forked, an expert id was out of range."""


class TraceError(EdgemoeError, ValueError):
    """A routing trace that cannot be read, or cannot be made."""

"""edgemoe: Mixture-of-Experts models bigger than your GPU, beside unmodified llama.cpp.

>>> import edgemoe
>>> llm = edgemoe.Llama("model.gguf", n_ctx=4096)        # or a package made by edgemoe-convert
>>> llm.create_chat_completion([{"role": "user", "content": "Hello"}])
"""

from edgemoe.errors import EdgemoeError, ModelError, ModelFault, TraceError

__version__ = "0.1.0"
__all__ = ["EdgemoeError", "Llama", "ModelError", "ModelFault", "Recorder", "Source", "Trace", "TraceError"]


def __getattr__(name: str):
    # Loading llama_cpp takes a moment and maps its libraries; `edgemoe --help` and edgemoe.convert need neither.
    if name == "Llama":
        from edgemoe.engine import Llama

        return Llama
    if name == "Source":
        from edgemoe.package import Source

        return Source
    if name == "Recorder":
        from edgemoe.record import Recorder

        return Recorder
    if name == "Trace":
        from edgemoe.trace import Trace

        return Trace
    raise AttributeError(f"module 'edgemoe' has no attribute '{name}'")

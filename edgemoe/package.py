"""A model on disk: a GGUF (one file or shards) or a package directory. Opening checks headers and sizes, and reads no weights."""

from __future__ import annotations

import os
from dataclasses import dataclass

from edgemoe import _native
from edgemoe.errors import ModelError

KINDS = ("dense", "stacked", "package")


@dataclass(frozen=True)
class Projection:
    """One product of an expert. `bytes` and the shape [n_out rows, n_in columns] are those of a single expert."""

    name: str
    type: str
    n_in: int
    n_out: int
    bytes: int


@dataclass(frozen=True)
class ExpertLayer:
    """A layer with routed experts; `layer` is its index in the model."""

    layer: int
    n_expert: int
    bytes_per_expert: int
    projections: tuple[Projection, ...]


class Source:
    """An opened model. Raises ModelError when it is damaged, incomplete or not a GGUF; the message says where, found, wanted.

    Attributes: path, kind ("dense", "stacked" or "package"), architecture, fingerprint (packages only, else ""), files (what llama.cpp maps),
    layers (list of ExpertLayer), expert_bytes and dense_bytes.
    """

    def __init__(self, path: str | os.PathLike, check_blobs: bool = True):
        """check_blobs: of a package look into every blob. To open a model does that, too."""
        self.path = os.fspath(path)
        self._ffi, self._lib = _native.load()
        if not os.path.exists(self.path):
            raise ModelError(f"{self.path}: no such file or directory")
        self.handle = _native.opened(self._lib.edgemoe_source_open(os.fsencode(self.path), check_blobs))
        self._describe()

    def package_fingerprint(self) -> str:
        """Of a package, or of a GGUF as its package would have it, so that what belongs to the model is found for both; empty for what cannot be packed."""
        if self.fingerprint:
            return self.fingerprint
        from edgemoe.convert import ConvertError
        from edgemoe.convert.layout import fingerprint
        from edgemoe.convert.source import open_source

        try:
            with open_source(self.path) as opened:
                return fingerprint(opened)
        except ConvertError:
            return ""

    def _describe(self) -> None:
        info = self._ffi.new("struct edgemoe_source_info *")
        self._lib.edgemoe_source_get_info(self.handle, info)
        self.kind = KINDS[info.kind]
        self.architecture = _native.text(info.architecture)
        self.fingerprint = _native.text(info.fingerprint)
        self.expert_bytes = info.expert_bytes
        self.dense_bytes = info.dense_bytes
        self.files = [_native.text(self._lib.edgemoe_source_file(self.handle, i)) for i in range(info.n_files)]
        self.layers = [self._layer(i) for i in range(info.n_layers)]

    def _layer(self, index: int) -> ExpertLayer:
        layer = self._ffi.new("struct edgemoe_layer_info *")
        projection = self._ffi.new("struct edgemoe_projection_info *")
        self._lib.edgemoe_source_get_layer(self.handle, index, layer)
        projections = []
        for p in range(layer.n_projections):
            self._lib.edgemoe_source_get_projection(self.handle, index, p, projection)
            projections.append(
                Projection(_native.text(projection.name), _native.text(projection.type), projection.n_in, projection.n_out, projection.bytes)
            )
        return ExpertLayer(layer.layer, layer.n_expert, layer.bytes_per_expert, tuple(projections))

    def integer(self, key: str, fallback: int = -1) -> int:
        """An integer of the model's metadata, named below its architecture: "expert_used_count"."""
        return self._lib.edgemoe_source_integer(self.handle, f"{self.architecture}.{key}".encode(), fallback)

    def read(self, index: int, projection: int, expert: int) -> bytes:
        """The bytes of one projection of one expert; `index` counts self.layers. Raises ModelError."""
        layer = self.layers[index]
        buffer = bytearray(layer.projections[projection].bytes)
        if self._lib.edgemoe_source_read(self.handle, index, projection, expert, self._ffi.from_buffer(buffer)) != 0:
            raise ModelError(_native.last_error())
        return bytes(buffer)

    def close(self) -> None:
        if getattr(self, "handle", None):
            self._lib.edgemoe_source_close(self.handle)
            self.handle = None

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

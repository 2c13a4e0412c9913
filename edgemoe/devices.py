"""The ggml devices of this process's llama-cpp-python."""

from __future__ import annotations

from dataclasses import dataclass

from edgemoe import _native

TYPES = ("cpu", "gpu", "igpu", "accel")
SOFTWARE = ("llvmpipe", "swiftshader", "lavapipe")


@dataclass(frozen=True)
class Device:
    """Memory in bytes, as the driver reports it; 0 where it does not."""

    name: str  # "Vulkan0"
    description: str  # "NVIDIA GeForce RTX 4060"
    type: str  # one of TYPES
    free: int
    total: int

    @property
    def is_software(self) -> bool:
        """A GPU that is really the CPU; never picked unless asked for."""
        return any(word in self.description.lower() for word in SOFTWARE)


def devices() -> list[Device]:
    ffi, lib = _native.load()
    info = ffi.new("struct edgemoe_device_info *")
    found = []
    for i in range(lib.edgemoe_device_count()):
        lib.edgemoe_get_device(i, info)
        kind = TYPES[info.type] if info.type < len(TYPES) else f"type {info.type}"
        found.append(Device(_native.text(info.name), _native.text(info.description), kind, info.free_bytes, info.total_bytes))
    return found


def has_gpu() -> bool:
    """A real one."""
    return any(d.type in ("gpu", "igpu") and not d.is_software for d in devices())

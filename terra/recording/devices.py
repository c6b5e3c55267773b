"""The EGL devices of a machine, over which recording spreads its processes."""

import ctypes
from functools import lru_cache
from typing import NamedTuple

_EGL_EXTENSIONS = 0x3055  # registry.khronos.org/EGL/api/EGL/egl.h
_EGL_CUDA_DEVICE_NV = 0x323A  # of the extension EGL_NV_device_cuda: a GPU's index in CUDA
_MAX_DEVICES = 64


class _Device(NamedTuple):
    """What EGL says of a device: its extensions, and whether it has an index in CUDA."""

    extensions: frozenset[str]
    has_cuda_index: bool


@lru_cache(maxsize=1)
def egl_devices() -> tuple[int, ...]:
    """The indices, as in EGL_EXT_device_enumeration, of the EGL devices to render on; at least (0,).

    The devices are NVIDIA's that CUDA may use: EGL gives a CUDA index only to those that CUDA_VISIBLE_DEVICES leaves
    visible. If it hides all of them (it is empty), they are all of NVIDIA's (Mesa lists the same GPUs again), else all
    GPUs, else the software renderers.
    """
    return _chosen(_devices())


def _chosen(devices: list[_Device]) -> tuple[int, ...]:
    nvidia = [index for index, device in enumerate(devices) if "EGL_NV_device_cuda" in device.extensions]
    for wanted in (
        [index for index in nvidia if devices[index].has_cuda_index],
        nvidia,
        [index for index, device in enumerate(devices) if "EGL_MESA_device_software" not in device.extensions],
        list(range(len(devices))),
    ):
        if wanted:
            return tuple(wanted)
    return (0,)


def _devices() -> list[_Device]:
    """The EGL devices in EGL's order; [] if there is no EGL, or it can't enumerate devices."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return []
    address = egl.eglGetProcAddress
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    names = (b"eglQueryDevicesEXT", b"eglQueryDeviceStringEXT", b"eglQueryDeviceAttribEXT")
    query, describe, ask = (address(name) for name in names)
    if not (query and describe and ask):
        return []
    integer = ctypes.POINTER(ctypes.c_int)
    query_devices = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), integer)(query)
    query_string = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)(describe)
    cuda_index = ctypes.c_ssize_t()
    query_index = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t))(ask)
    devices, count = (ctypes.c_void_p * _MAX_DEVICES)(), ctypes.c_int(0)
    if not query_devices(_MAX_DEVICES, devices, ctypes.byref(count)):
        return []
    return [
        _Device(
            frozenset((query_string(device, _EGL_EXTENSIONS) or b"").decode().split()),
            bool(query_index(device, _EGL_CUDA_DEVICE_NV, ctypes.byref(cuda_index))),
        )
        for device in devices[: count.value]
    ]

"""The EGL devices of a machine, over which recording spreads its processes."""

import ctypes
from functools import lru_cache

_EGL_EXTENSIONS = 0x3055  # registry.khronos.org/EGL/api/EGL/egl.h
_MAX_DEVICES = 64


@lru_cache(maxsize=1)
def egl_devices() -> tuple[int, ...]:
    """The indices, as in EGL_EXT_device_enumeration, of the EGL devices to render on; at least (0,).

    The devices are those of NVIDIA's driver if there are any (Mesa lists the same GPUs again), else all GPUs, else the
    software renderers.
    """
    extensions = _device_extensions()
    for wanted in (
        [index for index, names in enumerate(extensions) if "EGL_NV_device_cuda" in names],
        [index for index, names in enumerate(extensions) if "EGL_MESA_device_software" not in names],
        [index for index, _ in enumerate(extensions)],
    ):
        if wanted:
            return tuple(wanted)
    return (0,)


def _device_extensions() -> list[frozenset[str]]:
    """The extensions of each EGL device; [] if there is no EGL, or it can't enumerate devices."""
    try:
        egl = ctypes.CDLL("libEGL.so.1")
    except OSError:
        return []
    address = egl.eglGetProcAddress
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    query, describe = address(b"eglQueryDevicesEXT"), address(b"eglQueryDeviceStringEXT")
    if not query or not describe:
        return []
    integer = ctypes.POINTER(ctypes.c_int)
    query_devices = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), integer)(query)
    query_string = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)(describe)
    devices, count = (ctypes.c_void_p * _MAX_DEVICES)(), ctypes.c_int(0)
    if not query_devices(_MAX_DEVICES, devices, ctypes.byref(count)):
        return []
    return [
        frozenset((query_string(devices[index], _EGL_EXTENSIONS) or b"").decode().split())
        for index in range(count.value)
    ]

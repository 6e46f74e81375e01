"""Reads the GPU's clocks and throttle reasons through NVIDIA's management library, while work runs. Never sets
anything.

Called through ctypes: the library comes with the driver, and a call takes microseconds. Everything answers None, or an
empty tuple, where there is no driver.
"""

import ctypes
import functools

_SM_CLOCK = 1
# Bits of nvmlDeviceGetCurrentClocksThrottleReasons worth telling apart; idle (1) and application clocks (2) say
# nothing.
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
}


@functools.cache
def _open():
    """(library, handle of torch's current device), or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        lib = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if lib.nvmlInit_v2() != 0:
        return None
    handle = ctypes.c_void_p()
    uuid = f"GPU-{torch.cuda.get_device_properties().uuid}".encode()
    if lib.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) != 0:
        return None
    return lib, handle


def _number(call: str, *args, kind=ctypes.c_uint) -> int | None:
    opened = _open()
    if opened is None:
        return None
    lib, handle = opened
    value = kind()
    function = getattr(lib, call, None)  # None: this driver has another name for it
    return value.value if function and function(handle, *args, ctypes.byref(value)) == 0 else None


def sm_mhz() -> int | None:
    """The SM clock now, in MHz."""
    return _number("nvmlDeviceGetClockInfo", _SM_CLOCK)


def throttle() -> tuple[str, ...]:
    """Why the clock is held down now."""
    bits = _number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong) or 0
    return tuple(name for bit, name in _REASONS.items() if bits & bit)


def power_limit_w() -> int | None:
    """The enforced power limit in watts."""
    milliwatts = _number("nvmlDeviceGetEnforcedPowerLimit")
    return None if milliwatts is None else milliwatts // 1000


def driver() -> str | None:
    """The driver's version."""
    opened = _open()
    if opened is None:
        return None
    text = ctypes.create_string_buffer(96)
    return text.value.decode() if opened[0].nvmlSystemGetDriverVersion(text, 96) == 0 else None

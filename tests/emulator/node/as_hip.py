"""A pytest plugin: device "hip" is the emulated one, for tests that would open a real MI355X."""

from __future__ import annotations

import kosmos_raw.device.hip
from kosmos_raw.device.emulated import EmulatedDevice
from kosmos_raw.emulator.node import preload

preload()


class EmulatedHipDevice(EmulatedDevice):
    name = "hip"


kosmos_raw.device.hip.HipDevice = EmulatedHipDevice  # type: ignore[misc]

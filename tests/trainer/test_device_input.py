"""Where the partitions of a unit lie that comes from a device: on the host, or where a card takes them."""
from __future__ import annotations

from bpsfast.gpu.device import DeviceRegion, DeviceSegment, SharedMemory
from bpsfast.trainer.gpu.gpu_direct import DeviceInput
from bpsfast.trainer.input_memory import Region


def test_partitions_on_both_sides():
    segment = DeviceSegment(9, SharedMemory(1 << 40, 1 << 20, -1, "", lambda: None), 4096)
    device_input = DeviceInput(Region(None, 3, 8192, 1 << 30), DeviceRegion(segment, 12288, 2000), {1: 0, 3: 1000},
                               1000)
    assert [device_input.entry(number) for number in range(4)] == [(3, 8192), (9, 12288), (3, 10192), (9, 13288)]
    assert device_input.address == 1 << 30
    begin = (1 << 40) + 12288
    assert {number: base + 1000 * number for number, base in device_input.on_device.items()} == {
        1: begin, 3: begin + 1000}
    assert device_input.segments({("rank", 3): "mapped"}) == ["mapped"]


def test_all_on_one_side():
    host = DeviceInput(Region(None, 3, 0, 64), None, {}, 1000)
    assert host.on_device == {} and host.entry(2) == (3, 2000)
    segment = DeviceSegment(9, SharedMemory(1 << 40, 1 << 20, -1, "", lambda: None))
    direct = DeviceInput(None, DeviceRegion(segment, 0, 1000), {0: 0}, 1000)
    assert direct.address == 0 and direct.segments({}) == [] and direct.entry(0) == (9, 0)

"""Gradients on GPUs: how they get to host memory, where they are summed, and back, without anybody's stream standing
still.

    device, host, cuda    what a device can do; the machine itself as one, and CUDA (ROCm) through CuPy
    places                where an array lies, and on which stream its owner works
    pieces                a unit's bytes by partitions
    departures, arrivals  the two lines of a device: partitions to the host and back, the most urgent first
    crossing, gathering   one unit on its way there and back, and its tensors that lie on a device
    twins, broadcasts     what collectives and broadcasts read and write instead of memory on a device
    arrays                new ones on devices
    devices               the devices of a session
    direct, segments      memory of a device that cards read and write by themselves (GPUDirect)
    cuda_driver           what of CUDA's driver that takes
"""

"""GPU devices: copies between a GPU and host memory, and sums among the GPUs of a machine; independent of any session.

    device               what a device can do: streams, events, pinned and shared memory
    host, cuda           the machine itself as a device; CUDA (ROCm) through CuPy
    copies               the copy threads: partitions to the host and back, the most urgent first
    arrays               on which device and stream an array lies; new arrays on devices
    communicator         reduce and broadcast among GPUs: the interface, and NCCL
    shared_device        the same among ranks that share one device, by windows in its memory
    sum_kernels          the CUDA kernels of these sums
"""

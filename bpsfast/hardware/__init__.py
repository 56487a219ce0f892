"""What network cards this machine has and which of them reaches a peer: read, never changed.

`sysfs.Tree` reads files below a root (``/`` or a recorded tree), `kernel.Kernel` asks what no file tells (routes,
addresses); `host.Host` holds both. From these: `devices` (RDMA devices, ports, cards), `gids`, `numa`, `counters`,
and `route`, which chooses device and GID for a peer.
"""

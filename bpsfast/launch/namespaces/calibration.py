"""Measure the bandwidth between two machines, both directions at once, with plain TCP sockets.

The result is the bandwidth B of the communication model, against which bpsfast is measured in the same run. This file
is also the program that runs on the two machines; started by path, it imports the standard library only.

    python calibration.py listen PORT SECONDS           prints one JSON line when done
    python calibration.py connect HOST PORT SECONDS
"""
from __future__ import annotations

import json
import socket
import sys
import threading
import time

_CHUNK_NBYTES = 1 << 20
_WARMUP_SHARE = 0.2  # of the time, not counted: TCP's slow start and the shaper's initial burst
_CONNECT_TIMEOUT_S = 10.0


def exchange(sock: socket.socket, duration_s: float) -> dict[str, float]:
    """Send and receive at full speed for *duration_s*; return the bytes received and the seconds they took."""
    sock.settimeout(duration_s + _CONNECT_TIMEOUT_S)
    sender = threading.Thread(target=_send, args=(sock, time.monotonic() + duration_s), daemon=True)
    sender.start()
    buffer = memoryview(bytearray(_CHUNK_NBYTES))
    begin = time.monotonic() + duration_s * _WARMUP_SHARE
    end = begin + duration_s * (1 - 2 * _WARMUP_SHARE)
    counted, first, last = 0, 0.0, 0.0
    while nbytes := sock.recv_into(buffer):
        now = time.monotonic()
        if begin <= now <= end:
            if first:
                counted += nbytes
            else:
                first = now
            last = now
    sender.join(timeout=_CONNECT_TIMEOUT_S)
    return {"received": counted, "seconds": last - first}


def _send(sock: socket.socket, end: float) -> None:
    chunk = bytes(_CHUNK_NBYTES)
    while time.monotonic() < end:
        sock.sendall(chunk)
    sock.shutdown(socket.SHUT_WR)


def _listen(port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    with socket.create_server(("", port), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
                              ) as server:
        server.settimeout(_CONNECT_TIMEOUT_S)
        return server.accept()[0]


def _connect(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S)
        except ConnectionRefusedError:  # the other side is not listening yet
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.02)


def main(arguments: list[str]) -> int:
    """Be one end of the measurement."""
    if arguments[0] == "listen":
        sock = _listen(int(arguments[1]))
    else:
        sock = _connect(arguments[1], int(arguments[2]))
    with sock:
        print(json.dumps(exchange(sock, float(arguments[-1]))), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Types of `bpsfast.pyx.tcp`."""

class Stream:
    peer: int
    def __init__(
        self,
        fd: int,
        *,
        peer: int,
        engine: int,
        arrived: int,
        notify: int,
        epoch: int,
        n_slots: int,
        send_buffer_nbytes: int = ...,
        trace_capacity: int = ...,
        pace_out: int = ...,
        pace_in: int = ...,
        keep: object = ...,
    ) -> None: ...
    def bind(self, slot: int, address_even: int, address_odd: int, nbytes: int) -> None: ...
    def start(self) -> None: ...
    def post(self, slot: int, round: int, flags: int, address: int, nbytes: int) -> None: ...
    def counters(self) -> dict[str, int]: ...
    def trace(self) -> bytes: ...
    def close(self) -> None: ...

"""Unix stream sockets by which ranks and node processes of one machine exchange messages and file descriptors.

Frames are those of `framing`, with a tag of 4 bits: how many descriptors belong to the message. Descriptors travel by
SCM_RIGHTS with the first byte of their frame, so they have arrived when the word has; the count keeps them with their
message however the kernel cuts the stream into reads.

Names are abstract (`address`): nothing in the file system, nothing left by a killed process, and not to be guessed
without the job's key.
"""
from __future__ import annotations

import array
import hashlib
import hmac
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ..orchestration import messages
from ..orchestration.errors import PeerLostError, ProtocolError, StallError
from .framing import Frames
from .resources import Closing, is_ready

_FD_BITS = 4
#: No message is longer, and none comes with more descriptors.
MAX_NBYTES = (1 << 32 - _FD_BITS) - 1
MAX_FDS = (1 << _FD_BITS) - 1
_READ_NBYTES = 1 << 16
#: Reads of one socket per call: a process that never stops sending must not keep others waiting.
_MOST_READS = 64


def address(job_key: bytes, node_id: str) -> bytes:
    """Return the abstract name of the node *node_id*'s socket in the job that has *job_key*."""
    digest = hmac.new(job_key, f"node|{node_id}".encode(), hashlib.sha256).hexdigest()
    return b"\0bpsfast-" + digest[:32].encode()


def attach_proof(job_key: bytes, pid: int, local_rank: int) -> bytes:
    """Return the proof for a node that process *pid* has the job's key."""
    return hmac.new(job_key, f"attach|{pid}|{local_rank}".encode(), hashlib.sha256).digest()


def decode_local(data: bytes) -> messages.Message:
    """Return the `LocalMessage` in *data*."""
    return messages.decode(data, "local")


def connect(name: bytes, timeout_s: float,
            decode: Callable[[bytes], messages.Message] = decode_local) -> MessageSocket:
    """Connect to the socket *name*, trying again until a process listens there.

    Raises `StallError` if no process listened within *timeout_s* seconds. `ProtocolError` if another user's process
    listens: once a node has ended, any process may take its name.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(name)
            pid, uid = peer_uid(sock)
            if uid not in (os.getuid(), 0):
                raise ProtocolError(f"process {pid} of user {uid} listens on the local socket of this job's node, but "
                                    f"this process runs as user {os.getuid()}: nothing is sent to it")
            return MessageSocket(sock, decode)
        except (ConnectionRefusedError, FileNotFoundError, BlockingIOError, TimeoutError):
            # Refused: not bound yet. EAGAIN: its backlog is full.
            sock.close()
        except BaseException:
            sock.close()
            raise
        if time.monotonic() >= deadline:
            shown = name.lstrip(b"\0").decode()
            raise StallError(f"no node listened on the local socket @{shown} within {timeout_s:g} s: the node process "
                             "of this machine was not started, has died, or was given another scheduler, job key or "
                             "node_id")
        time.sleep(0.02)


def peer_uid(sock: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the process at the other end, as the kernel knows them."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid


class MessageSocket(Closing):
    """One end of a connected Unix stream socket. Owns the socket, and descriptors that were not handed out yet.

    Any thread may send; one thread at a time may receive. The socket becomes non-blocking: no call waits longer than
    its timeout.

    *sock* is a connected AF_UNIX stream socket. *decode* turns a frame's bytes into a message; the default reads
    `messages.LocalMessage`. Messages longer than *frame_max_nbytes* are refused; it is smaller than the default for
    peers that are not authenticated.
    """

    def __init__(self, sock: socket.socket, decode: Callable[[bytes], messages.Message] = decode_local,
                 frame_max_nbytes: int = MAX_NBYTES) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = Frames(decode, "a local message", "", frame_max_nbytes, _FD_BITS)
        self._inbox_fds: deque[int] = deque()
        self._ready: deque[tuple[messages.Message, tuple[int, ...]]] = deque()
        self._outbox: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._n_queued = self._n_taken = 0  # messages: to be sent, and sent
        self._lock = threading.Lock()
        self._ended = False

    @property
    def frame_max_nbytes(self) -> int:
        """No longer message is taken."""
        return self._frames.max_nbytes

    @frame_max_nbytes.setter
    def frame_max_nbytes(self, nbytes: int) -> None:
        self._frames.max_nbytes = nbytes

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 after `close`."""
        return self._sock.fileno()

    @property
    def peer(self) -> tuple[int, int]:
        """Process id and user id of the other end."""
        return peer_uid(self._sock)

    @property
    def backlog(self) -> bool:
        """Whether posted bytes still wait for the other end to read: poll for writing and call `flush`."""
        return bool(self._outbox)

    def post(self, message: messages.Message, fds: Sequence[int] = ()) -> None:
        """Send *message* and the descriptors *fds* as far as the socket takes it now; keep the rest for `flush`.

        *fds* must stay open until `backlog` is false; the receiver gets its own copies.
        """
        with self._lock:
            self._enqueue(message, fds)
            self._flush()

    def send(self, message: messages.Message, fds: Sequence[int] = (), timeout_s: float = 30.0) -> None:
        """Send *message* and the descriptors *fds*; return when the kernel has taken all. Others may `post` meanwhile.

        Raises `StallError` if the other end did not read for *timeout_s* seconds, `PeerLostError` if it is closed.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._enqueue(message, fds)
            number = self._n_queued
        while True:
            with self._lock:
                self._flush()
                if self._n_taken >= number:
                    return
            if not is_ready(self._sock, deadline - time.monotonic(), select.POLLOUT):
                raise StallError(f"process {self.peer[0]} did not read its local channel for {timeout_s:g} s while "
                                 f"{type(message).__name__} was being sent")

    def flush(self) -> bool:
        """Send what the socket takes now; return whether nothing is left."""
        with self._lock:
            return self._flush()

    def recv(self, timeout_s: float) -> tuple[messages.Message, tuple[int, ...]]:
        """Return the next message and its descriptors, which now belong to the caller.

        Raises `StallError` if none came within *timeout_s* seconds, `PeerLostError` if the other end was closed.
        """
        deadline = time.monotonic() + timeout_s
        while not self._ready:
            self._read()
            if self._ready:
                break
            self._raise_if_ended()
            if not is_ready(self._sock, deadline - time.monotonic()):
                raise StallError(f"process {self.peer[0]} sent nothing on its local channel for {timeout_s:g} s")
        return self._ready.popleft()

    def recv_nowait(self) -> list[tuple[messages.Message, tuple[int, ...]]]:
        """Return the messages that have arrived, maybe none; at most about 4 MiB per call.

        Raises `PeerLostError` once, after the last message. `ProtocolError` if a message is too long, or cannot be
        read: nothing more can be received.
        """
        self._read()
        found = list(self._ready)
        self._ready.clear()
        if not found:
            self._raise_if_ended()
        return found

    def close(self) -> None:
        """Close the socket and all descriptors that were not handed out. Idempotent."""
        self._sock.close()
        for fd in [*self._inbox_fds, *(fd for _, fds in self._ready for fd in fds)]:
            os.close(fd)
        self._inbox_fds.clear()
        self._ready.clear()
        self._outbox.clear()

    def _enqueue(self, message: messages.Message, fds: Sequence[int]) -> None:
        if len(fds) > MAX_FDS:
            raise ProtocolError(f"{type(message).__name__} with {len(fds)} descriptors does not fit one frame (at most "
                                f"{MAX_FDS} descriptors)")
        self._outbox.append((memoryview(self._frames.pack(message, len(fds))), tuple(fds)))
        self._n_queued += 1

    def _flush(self) -> bool:
        while self._outbox:
            view, fds = self._outbox[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([view], ancillary, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return False
            except OSError as exc:
                raise PeerLostError(f"the other end of a local channel is gone: {exc}") from exc
            if sent < len(view):
                # The kernel attaches descriptors to the first byte it takes: never send them twice.
                self._outbox[0] = (view[sent:], ())
            else:
                self._outbox.popleft()
                self._n_taken += 1
        return True

    def _read(self) -> None:
        """Take all bytes that have arrived and turn whole frames into messages."""
        for _ in range(_MOST_READS):
            if self._ended:
                return
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(_READ_NBYTES, socket.CMSG_SPACE(4 * MAX_FDS),
                                                               socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                self._ended = True  # reset: as good as closed
                return
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds = array.array("i")
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                    self._inbox_fds.extend(fds)
            if flags & socket.MSG_CTRUNC:
                raise ProtocolError("descriptors of a local message were cut off: this process has no free descriptors "
                                    "(ulimit -n)")
            if not data:
                self._ended = True
                return
            self._frames.feed(data)
            while (message := self._frames.next()) is not None:
                n_fds = self._frames.tag
                if n_fds > len(self._inbox_fds):
                    raise ProtocolError(f"a local message announces {n_fds} descriptors, {len(self._inbox_fds)} came")
                self._ready.append((message, tuple(self._inbox_fds.popleft() for _ in range(n_fds))))
            if len(self._inbox_fds) > MAX_FDS:  # only those of one unfinished message can be waiting
                raise ProtocolError(f"{len(self._inbox_fds)} descriptors came on a local channel without a message")

    def _raise_if_ended(self) -> None:
        if self._ended:
            raise PeerLostError("the other end of a local channel was closed")

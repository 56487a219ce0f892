"""A connection's turn: one that always takes more does not keep the others waiting."""
from __future__ import annotations

import socket

import numpy as np
import pytest

from bpsfast.collectives.p2p.frame_socket import _TURN_NBYTES, FrameSocket
from bpsfast.collectives.p2p.protocol import DATA, HEADER, PIECE_NBYTES, Frame

pytestmark = pytest.mark.usefixtures("no_leaks")

N_PIECES = 20


class FastSocket(socket.socket):
    """Its other end reads at once what is written."""

    def __init__(self, sock, other):
        super().__init__(fileno=sock.detach())
        self.other = other
        self.read = bytearray()

    def sendmsg(self, *arguments):
        n = super().sendmsg(*arguments)
        end = len(self.read) + n
        while len(self.read) < end:
            self.read += self.other.recv(n)
        return n


class Sender:
    """Has pieces to send."""

    def __init__(self):
        self.pieces = [np.full(PIECE_NBYTES, i, np.uint8) for i in range(N_PIECES)]
        self.n_begun = 0
        self.sent_numbers = []

    def next_piece(self):
        if self.n_begun == N_PIECES:
            return None
        self.n_begun += 1
        return Frame(DATA, number=self.n_begun, nbytes=PIECE_NBYTES), memoryview(self.pieces[self.n_begun - 1])

    def sent(self, frame):
        self.sent_numbers.append(frame.number)


def test_a_peer_that_takes_everything_has_its_turn_and_then_others():
    ours, theirs = socket.socketpair()
    sender = Sender()
    with FastSocket(ours, theirs) as sock, theirs:
        link = FrameSocket(sock, sender)
        n_turns = 0
        while not n_turns or link.backlog:
            before = len(sock.read)
            link.flush()
            n_turns += 1
            assert len(sock.read) - before <= _TURN_NBYTES + PIECE_NBYTES
        assert n_turns == 5
        assert sender.sent_numbers == list(range(1, N_PIECES + 1))
        found = np.frombuffer(sock.read, np.uint8).reshape(N_PIECES, HEADER.size + PIECE_NBYTES)
        assert np.array_equal(found[:, HEADER.size:], np.array(sender.pieces))

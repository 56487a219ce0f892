"""Sets up an RDMA link between two nodes: offers, queue pairs, and a test write in each direction.

The dialler opens one authenticated data connection with the stream number `STREAM`, which no tcp stream has; from then
on both sides do the same. Any objection, on either side and at any step, is sent to the other, so both fail with the
same error. Of several rails those are used over which the test writes pass.
"""
from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from ....base.message_socket import MessageSocket
from ....base.trace_records import Limits
from ....orchestration.errors import BpsError, PeerLostError, ProtocolError, StallError, UnsupportedError
from . import rdma_messages
from .failures import NoRdmaError
from .link import RailPath, RdmaLink
from .rails import PeerRail
from .rdma_messages import PairOffer, RailOffer, RdmaOffer, RdmaPairs, RdmaProven, RdmaStep

log = logging.getLogger("bpsfast.node")

STREAM = 1000
#: Timeout of one step, in which the peer does the same. A test includes all retries of an unanswered write.
STEP_TIMEOUT_S = 20.0
PROOF_TIMEOUT_S = 10.0
#: A write that finds no receive request is sent again after 0.64 ms, without limit (7): the peer's thread is late, and
#: posts more. If the peer is stopped or hangs, the stream's silence or the heartbeats end it.
_MIN_RNR_TIMER, _RNR_RETRY = 12, 7

M = TypeVar("M", RdmaOffer, RdmaPairs, RdmaStep, RdmaProven)


def make_link(
    sock: socket.socket, peer: int, find: Callable[[], list[PeerRail]], *, n_pairs: int, n_nodes: int, epoch: int,
    n_slots: int, limits: Limits, deadline: float, least_rails: int = 1, known: Mapping[str, str] | None = None,
) -> RdmaLink:
    """Make a link to node *peer* over the authenticated connection *sock*, which is owned by the link, or closed.

    *find* returns this node's rails to the peer, or raises `NoRdmaError`. *deadline* in monotonic seconds. A link of
    fewer than *least_rails* rails is not made. *known*: the rails that led there before (`RdmaLink.rails`), and are the
    only ones to use. Blocks.

    Raises
    ------
    NoRdmaError
        With the reason, which the peer knows, too.
    BpsError
        The peer has ended, or broken the protocol.
    """
    with contextlib.ExitStack() as undo:
        channel = undo.enter_context(MessageSocket(sock, rdma_messages.decode))
        talk = _Exchange(channel, peer, deadline)
        rails: list[PeerRail] = []

        def our_offer() -> RdmaOffer:
            rails.extend(find())
            return RdmaOffer(version=rdma_messages.VERSION, rails=tuple(rail.offer() for rail in rails),
                             n_pairs=n_pairs)

        theirs = talk.exchange(our_offer, RdmaOffer(version=rdma_messages.VERSION))
        partners = _pair_up(rails, theirs, min(n_pairs, theirs.n_pairs), peer, least_rails, known)
        paths: list[RailPath] = []

        def our_pairs() -> RdmaPairs:
            for rail, far in partners:
                paths.append(RailPath.over(rail, f"{far.device}/{far.port}", epoch, n_slots, limits))
                undo.callback(paths[-1].close)
            return RdmaPairs(pairs=tuple(PairOffer(number=path.pair.number, psn=path.pair.psn) for path in paths))

        their_pairs = talk.exchange(our_pairs, RdmaPairs()).pairs
        if len(their_pairs) != len(paths):
            raise ProtocolError(f"node {peer} made {len(their_pairs)} queue pairs, {len(paths)} were agreed on")

        proofs: list[bool] = []
        errors: dict[int, Exception] = {}

        def connected() -> RdmaStep:
            for number, (path, (_, rail_there), there) in enumerate(zip(paths, partners, their_pairs)):
                try:
                    _connect(path, rail_there, there)
                except (OSError, UnsupportedError) as exc:
                    errors[number] = exc
            if len(errors) == len(paths):
                raise errors[0]
            return RdmaStep(step="connected")

        def proven() -> RdmaProven:
            proofs.extend(_prove(paths, errors))
            if not any(proofs):
                raise NoRdmaError(_why_unproven(paths[0], peer, errors.get(0)))
            return RdmaProven(pairs=tuple(number for number, is_proven in enumerate(proofs) if is_proven))

        talk.exchange(connected, RdmaStep(step="connected"))
        proven_there = talk.exchange(proven, RdmaProven()).pairs
        used = [number for number, is_proven in enumerate(proofs) if is_proven and number in proven_there]
        if len({paths[number].route.name for number in used}) < least_rails:
            raise NoRdmaError(f"first writes passed both ways over {len(used)} of {len(paths)} queue pairs to node "
                              f"{peer}: too few")
        for number, path in enumerate(paths):
            if number not in used:
                log.warning("a rail to node %d is not used: %s", peer, _why_unproven(path, peer, errors.get(number)))
                path.close()
        undo.pop_all()
    rates = [min(paths[number].route.chosen.gbps, partners[number][1].gbps) for number in used]
    return RdmaLink(peer, n_nodes, [paths[number] for number in used], channel, rates)


class _Exchange:
    """Exchanges messages in lockstep: each side sends one and reads one. Objections end it."""

    def __init__(self, channel: MessageSocket, peer: int, deadline: float) -> None:
        self._channel = channel
        self._peer = peer
        self._deadline = deadline

    def exchange(self, make: Callable[[], M], blank: M) -> M:
        """Send what *make* returns, or its error in *blank*; return the peer's message of the same kind."""
        cause: Exception | None = None
        try:
            mine = make()
        except (BpsError, OSError, MemoryError, ValueError) as exc:  # ValueError: the device was closed meanwhile
            cause = exc
            words = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
            mine = msgspec.structs.replace(blank, objection=words or type(exc).__name__)
        theirs = self._swap(mine)
        if cause is not None:
            raise NoRdmaError(mine.objection) from cause
        if theirs.objection:
            raise NoRdmaError(f"node {self._peer} reports: {theirs.objection}")
        return theirs

    def _swap(self, mine: M) -> M:
        """Send, then read, even with an objection: unread data would reset the connection too early."""
        what = type(mine).__name__
        try:
            self._channel.send(mine, timeout_s=self._left())
            theirs, _ = self._channel.recv(self._left())
        except StallError as exc:
            raise StallError(f"node {self._peer} did not answer {what} in time on the connection for RDMA") from exc
        except PeerLostError as exc:
            raise PeerLostError(f"node {self._peer} closed the connection for RDMA and did not answer {what}") from exc
        if not isinstance(theirs, type(mine)):
            raise ProtocolError(f"node {self._peer} answered {what} with {type(theirs).__name__}")
        return theirs

    def _left(self) -> float:
        return min(STEP_TIMEOUT_S, max(0.1, self._deadline - time.monotonic()))


def pairs_of(ours: Sequence[RailOffer], theirs: Sequence[RailOffer]) -> list[tuple[int, int]]:
    """Return which of *ours* and of *theirs* are the ends of one rail, by their places; the peer finds the same rails.

    Ports of one network pair up first. Of the others, as where each link is routed, those on the route to the other
    node, then those of the same position. If there is no pair at all, they pair up in the order of their positions.
    Within each group ports of equal positions come first. Whether a pair works is found by its first write.
    """
    found: list[tuple[int, int]] = []
    left, right = set(range(len(ours))), set(range(len(theirs)))

    def pair(here: Iterable[int], there: Iterable[int]) -> None:
        fresh = list(zip(sorted(here, key=lambda n: ours[n].position), sorted(there, key=lambda n: theirs[n].position)))
        found.extend(fresh)
        left.difference_update(n for n, _ in fresh)
        right.difference_update(n for _, n in fresh)

    def pair_equal(here: Collection[int], there: Collection[int]) -> None:
        both = {ours[n].position for n in here} & {theirs[n].position for n in there}
        pair([n for n in here if ours[n].position in both], [n for n in there if theirs[n].position in both])

    def pair_group(is_in: Callable[[RailOffer], bool]) -> None:
        for how in (pair_equal, pair):
            how([n for n in left if is_in(ours[n])], [n for n in right if is_in(theirs[n])])

    for network in sorted({each.network for each in ours if each.network}):
        pair_group(lambda each, network=network: each.network == network)
    pair_group(lambda each: each.is_on_route)
    pair_equal(left, right)
    if not found:
        pair(left, right)
    return found


def _pair_up(rails: list[PeerRail], theirs: RdmaOffer, n_pairs: int, peer: int, least_rails: int,
             known: Mapping[str, str] | None) -> list[tuple[PeerRail, RailOffer]]:
    """Return the rails of each stream, in the order in which the streams take turns over them."""
    if theirs.version != rdma_messages.VERSION:
        raise NoRdmaError(f"node {peer} has version {theirs.version} of the RDMA handshake, this node "
                          f"{rdma_messages.VERSION}")
    offers = [rail.offer() for rail in rails]
    partners: list[tuple[PeerRail, RailOffer]] = []
    unlike: list[str] = []
    if known is None:
        pairs = pairs_of(offers, theirs.rails)
    else:
        here, there = ({f"{each.device}/{each.port}": number for number, each in enumerate(them)}
                       for them in (offers, theirs.rails))
        pairs = [(here[name], there[far]) for name, far in known.items() if name in here and far in there]
    for mine, other in pairs:
        ours, far = offers[mine], theirs.rails[other]
        if (ours.link_layer, ours.version) == (far.link_layer, far.version):
            partners.append((rails[mine], far))
        else:
            unlike.append(f"{rails[mine].name} ({ours.link_layer}, GID {ours.version}) cannot speak to node {peer}'s "
                          f"{far.device}/{far.port} ({far.link_layer}, GID {far.version}): choose GIDs of one kind "
                          "with BPSFAST_RDMA_GID_INDEX, or other ports with BPSFAST_RDMA_DEVICES")
    if unlike and not partners:
        raise NoRdmaError("; ".join(unlike))
    for words in unlike:
        log.warning("a rail to node %d is not used: %s", peer, words)
    if not theirs.rails or n_pairs < 1:
        raise NoRdmaError(f"node {peer} offers no port")
    if len(partners) < least_rails:
        raise NoRdmaError(f"{len(partners)} ports have their counterpart on the other side, {least_rails} are needed: "
                          f"{_names(offers)} here, {_names(theirs.rails)} on node {peer}")
    if len(pairs) < max(len(offers), len(theirs.rails)):
        log.debug("ports towards node %d without a counterpart are not used: %s here, %s there", peer, _names(offers),
                  _names(theirs.rails))
    return partners * n_pairs


def _names(offers: Sequence[RailOffer]) -> str:
    return ", ".join(f"{each.device}/{each.port} ({each.network or 'network unknown'})" for each in offers)


def _connect(path: RailPath, rail: RailOffer, pair: PairOffer) -> None:
    path.pair.to_rtr(
        pair.number, pair.psn, **path.route.chosen.path(rail.link_layer, rail.lid, rail.gid, rail.pkey),
        mtu=min(rail.mtu, path.route.offer().mtu), min_rnr_timer=_MIN_RNR_TIMER,
        traffic_class=path.rail.settings.rdma_traffic_class, sl=path.rail.settings.rdma_service_level,
    )
    # By default 0.54 s until a packet is sent again, six times: a peer or path fails after about four seconds.
    path.pair.to_rts(timeout=path.rail.settings.rdma_timeout, retry_count=path.rail.settings.rdma_retries,
                     rnr_retry=_RNR_RETRY)


def _prove(paths: list[RailPath], errors: dict[int, Exception]) -> list[bool]:
    """Return over which *paths* a first write passes; all are tried at once. Adds to *errors*, by number."""
    proofs = [False] * len(paths)

    def prove(number: int) -> None:
        try:
            proofs[number] = paths[number].stream.prove(PROOF_TIMEOUT_S)
        except OSError as exc:
            errors[number] = exc
        except ValueError as exc:  # the stream was closed meanwhile
            log.debug("%s", exc)

    # Daemons: a node that ends does not wait for them.
    threads = [threading.Thread(target=prove, args=(number,), daemon=True) for number in range(len(paths))
               if number not in errors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return proofs


def _why_unproven(path: RailPath, peer: int, error: Exception | None) -> str:
    gid = path.route.chosen.gid
    came_from = f"{path.rail.name}, GID {gid.index} ({gid.version} {gid.address})" if gid else path.rail.name
    if error is not None:
        return f"queue pairs could not be connected from {came_from}: {error}"
    what = (path.describe(f"node {peer}") if path.stream.failure() is not None
            else f"nothing came from node {peer} within {PROOF_TIMEOUT_S:g} s, or nothing came there")
    return f"queue pairs were connected, but a first write did not pass from {came_from}: {what}"

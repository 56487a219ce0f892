"""Input memory of a rank: what the node gives, also to a request that nobody waits for any more."""
from __future__ import annotations

import os

import pytest

from bpsfast.orchestration.errors import CapacityError, StallError
from bpsfast.orchestration.messages import Allocated, Refuse, SegmentShared
from bpsfast.pyx.pages import Segment
from bpsfast.trainer.input_memory import InputMemory

PAGE = 4096


class Node:
    """Has one segment of 16 pages, and says what is in `answers` while a rank waits."""

    def __init__(self):
        self.segment = Segment(16 * PAGE, name="test", pool=False)
        self.memory = InputMemory(0, 0.01, lambda: None, self)
        self.asked = []
        self.answers = []

    def send(self, message):
        self.asked.append(message)

    def wait(self, ready, timeout_s):
        while self.answers:
            self.say(self.answers.pop(0))
        return ready()

    def say(self, message):
        self.memory.receive(message, (os.dup(self.segment.fileno()),) if isinstance(message, SegmentShared) else ())


@pytest.fixture
def node():
    made = Node()
    made.say(SegmentShared(owner="rank", segment=0, nbytes=16 * PAGE))
    yield made
    for segment in made.memory.forget():
        segment.close()
    made.segment.close()


def test_what_is_released_is_given_out_again_and_the_node_is_not_asked(node):
    node.answers = [Allocated(request=1, segment=0, offset=2 * PAGE)]
    region = node.memory.allocate(PAGE + 1)
    assert (region.segment, region.offset, region.array.nbytes) == (0, 2 * PAGE, PAGE + 1)
    assert node.memory.locate(region.address, 10) == (0, 2 * PAGE)
    address = region.address
    node.memory.release(region)
    assert node.memory.allocate(2 * PAGE).address == address and len(node.asked) == 1


def test_what_comes_too_late_is_not_lost(node):
    with pytest.raises(StallError, match=r"did not answer a request for 8192 bytes within 0\.01 s"):
        node.memory.allocate(2 * PAGE)
    with pytest.raises(StallError):
        node.memory.allocate(PAGE)
    node.say(Allocated(request=1, segment=0, offset=4 * PAGE))
    node.say(Refuse(error="CapacityError", reason="full"))
    assert node.memory.allocate(2 * PAGE).offset == 4 * PAGE and len(node.asked) == 2


def test_late_memory_that_could_not_be_mapped_is_nobodys(node):
    with pytest.raises(StallError):
        node.memory.allocate(PAGE)
    node.say(Allocated(request=1, segment=7, offset=0))
    node.answers = [Allocated(request=2, segment=0, offset=0)]
    assert node.memory.allocate(PAGE).segment == 0


def test_a_refusal_is_that_of_the_earliest_request(node):
    node.answers = [Refuse(error="CapacityError", reason="the machine is full")]
    with pytest.raises(CapacityError, match="the machine is full"):
        node.memory.allocate(PAGE)

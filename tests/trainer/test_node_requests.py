"""Questions of a rank: each gets its own answer, and an answer that nobody wants any more is not kept."""
from __future__ import annotations

import pytest

from bpsfast.orchestration.errors import PeerLostError, StallError
from bpsfast.orchestration.messages import Counters, CountersRequest
from bpsfast.trainer.node_connection import NodeRequests


class Node:
    """Answers what it is asked with the numbers in `answers`, in that order, while somebody waits."""

    def __init__(self):
        self.questions = NodeRequests(0.01, self)
        self.asked = []
        self.answers = []
        self.lost = False

    def send(self, question, fds):
        self.asked.append(question.request)

    def wait(self, ready, timeout_s):
        for number in self.answers:
            self.questions.receive(number, Counters(request=number, counters={}))
        if self.lost:
            raise PeerLostError("the node is gone")
        return ready()


def ask(node, **more):
    return node.questions.ask(Counters, lambda request: CountersRequest(request=request), "the node did not answer",
                              **more)


def test_an_answer_is_that_questions():
    node = Node()
    node.answers = [3, 2, 1]
    assert [ask(node).request for _ in range(3)] == [1, 2, 3]
    assert node.asked == [1, 2, 3]


@pytest.mark.parametrize("how", ["late", "given up", "lost"])
def test_an_answer_that_comes_too_late_is_not_kept(how):
    node = Node()
    node.lost = how == "lost"
    if how == "given up":
        assert ask(node, given_up=lambda: Counters(request=0, counters={})).request == 0
    else:
        with pytest.raises(PeerLostError if node.lost else StallError):
            ask(node)
    node.lost = False
    node.questions.receive(1, Counters(request=1, counters={}))
    assert node.questions._answers == {}
    node.answers = [1, 2]
    assert ask(node).request == 2
    assert node.questions._answers == {}

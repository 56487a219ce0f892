"""A deterministic training that records the workers of each step, for elastic jobs whose workers are killed.

    python -m tests.support.elastic_training FOLDER STEPS [DEED]...

The deed ``MEMBER@STEP+SECONDS`` kills worker MEMBER SECONDS after the start of STEP, ``MEMBER%RESTORE+SECONDS`` SECONDS
after its RESTORE-th return to a commit, ``MEMBER~SECONDS`` SECONDS after it has begun to join its first job.
``MEMBER&OTHER@STEP`` makes it kill OTHER and itself at STEP, ``MEMBER!STEP`` raise a ValueError, ``MEMBER=STEP`` stop
as by SIGSTOP. ``own`` uses a state of a user-defined class. ``+STEP`` makes worker 0 write the file *add* in STEP; two
ranks then wait for more.
"""
from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import bpsfast
from bpsfast import elastic
from bpsfast.elastic.coordinator_client import current_client
from bpsfast.trainer import process

SIZE = 50_000


def pushed(rank: int, step: int) -> np.ndarray:
    """Return the array that *rank* pushes in *step*."""
    return np.random.default_rng((rank, step)).standard_normal(SIZE, dtype=np.float32)


def averaged(nodes: Sequence[int], step: int, members: Sequence[int] | None = None) -> np.ndarray:
    """Return the average over *members* (None: all ranks) of *nodes*, summed over those of each node first."""
    members = range(len(nodes)) if members is None else members
    groups = [[rank for rank in members if nodes[rank] == node] for node in dict.fromkeys(nodes[i] for i in members)]
    partials = [functools.reduce(np.add, (pushed(rank, step) for rank in ranks)) for ranks in groups]
    return functools.reduce(np.add, partials) / np.float32(len(members))


def kill_later(seconds: float) -> None:
    """Kill this process after *seconds*."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


class Deeds:
    """The deeds of this worker."""

    def __init__(self, words: Sequence[str], member: int) -> None:
        mine = [word for word in words if word[0] != "+" and "&" not in word]
        self.takes_along = dict(self._parsed([word for word in words if "&" in word], "&", member))
        self.at_step = dict(self._parsed(mine, "@", member))
        self.at_restore = dict(self._parsed(mine, "%", member))
        self.raises = [int(word.split("!")[1]) for word in mine if "!" in word and int(word.split("!")[0]) == member]
        self.stops = [int(word.split("=")[1]) for word in mine if "=" in word and int(word.split("=")[0]) == member]
        self.adds = [int(word[1:]) for word in words if word.startswith("+")]

    @staticmethod
    def _parsed(words: Sequence[str], mark: str, member: int) -> list[tuple[int, float]]:
        found = []
        for word in words:
            who, has_mark, rest = word.partition(mark)
            if has_mark and int(who) == member:
                when, _, seconds = rest.partition("@" if mark == "&" else "+")
                found.append((int(when), float(seconds)))
        return found


class Counted(elastic.ObjectState):
    """A state that counts how often it was restored."""

    def __init__(self, deeds: Deeds, **objects: object) -> None:
        self._deeds, self._n_restored = deeds, 0
        super().__init__(**objects)

    def restore(self) -> None:
        """As of `ObjectState`."""
        super().restore()
        self._n_restored += 1
        if self._n_restored in self._deeds.at_restore:
            kill_later(self._deeds.at_restore[self._n_restored])


class Own(elastic.State):
    """A user-defined state, which also counts."""

    def __init__(self, deeds: Deeds, weights: np.ndarray, step: int) -> None:
        super().__init__()
        self._deeds, self._n_restored = deeds, 0
        self.weights, self.step = weights, step
        self.keep()

    def keep(self) -> None:
        """See `State`."""
        self._kept = self.weights.copy(), self.step

    def restore(self) -> None:
        """See `State`."""
        self.weights[...], self.step = self._kept
        self._n_restored += 1
        if self._n_restored in self._deeds.at_restore:
            kill_later(self._deeds.at_restore[self._n_restored])

    def give(self, root: int) -> None:
        """See `State`."""
        mine = np.append(self.weights.astype(np.float64), self.step) * (bpsfast.rank() == root)
        found = bpsfast.push_pull(mine, name="state", average=False)
        self.weights[...], self.step = found[:-1], int(found[-1])


def main() -> None:
    folder, n_steps, *words = sys.argv[1:]
    has_own = "own" in words
    words = [word for word in words if word != "own"]
    for word in words:
        who, is_early, seconds = word.partition("~")
        if is_early and who == os.environ.get("BPSFAST_MEMBER"):
            kill_later(float(seconds))
    bpsfast.init()
    member = current_client()
    number = member.number if member is not None else bpsfast.rank()
    deeds = Deeds(words, number)
    (Path(folder) / f"pid{number}").write_text(str(os.getpid()))
    state = (Own if has_own else Counted)(deeds, weights=np.zeros(SIZE, np.float32), step=0)
    weights = state.weights
    sizes = [bpsfast.size()]
    state.register_reset_callbacks([lambda: sizes.append(bpsfast.size())])
    log = open(Path(folder) / f"worker{number}", "a", buffering=1, encoding="utf-8")

    @elastic.run
    def train(state: Counted | Own) -> int:
        job = member.job if member is not None else 0
        print(json.dumps({"job": job, "rank": bpsfast.rank(), "node": process.current().node,
                          "size": bpsfast.size()}), file=log)
        while state.step < int(n_steps):
            if state.step in deeds.at_step:
                kill_later(deeds.at_step[state.step])
            for other, step in deeds.takes_along.items():
                if step == state.step:
                    for each in (other, number):
                        os.kill(int((Path(folder) / f"pid{each}").read_text()), signal.SIGKILL)
            if state.step in deeds.stops:
                os.kill(os.getpid(), signal.SIGSTOP)
            if state.step in deeds.raises:
                raise ValueError("a bug of the user")
            if state.step in deeds.adds and bpsfast.size() == 2 and number == 0:
                (Path(folder) / "add").touch()
            mean = bpsfast.push_pull(pushed(bpsfast.rank(), state.step), name="g")
            if state.step in deeds.adds and bpsfast.size() == 2:
                state.check()  # the step is repeated until a worker has joined
                continue
            print(json.dumps({"job": job, "step": state.step, "members": bpsfast.contributors("g")}), file=log)
            state.weights += mean
            state.step += 1
            state.commit()
        return state.step

    assert train(state) == int(n_steps) and state.weights is weights, "arrays keep their memory"
    np.save(Path(folder) / f"weights{number}.npy", weights)
    print(json.dumps({"sizes": sizes}), file=log)
    bpsfast.shutdown()


if __name__ == "__main__":
    main()

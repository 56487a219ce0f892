"""How far a round of a partition has come on one node, and who it waits for there."""
from __future__ import annotations

from collections.abc import Callable, Mapping

from ..orchestration.messages import Stage
from ..orchestration.placement.partition import rounds_ahead
from ..pyx.engine import Engine
from .plan_installer import PlanInstaller


def missing(engine: Engine, plan_installer: PlanInstaller, ranks: Mapping[int, int], node_of: Callable[[int], int | None], part: int,
            round_: int) -> tuple[Stage, tuple[int, ...], tuple[int, ...]]:
    """Return (stage, ranks, nodes) of *round_* of *part*; *ranks* and *node_of* are by the engine's sources."""
    try:
        found = engine.missing(part)
    except ValueError:
        return "done", (), ()  # a helper that has nothing to do with it
    waited_for, sources, owned = found
    if rounds_ahead(waited_for, round_) > 0:
        return "done", (), ()
    if owned and not sources:  # all there: an answer of a store may wait for other workers
        behind = plan_installer.ranks_of(engine.behind(part))
        return ("push", behind, ()) if behind else ("sum", (), ())
    late = tuple(ranks[source] for source in sources if source in ranks)
    nodes = tuple(index for source in sources for index in (node_of(source),) if index is not None)
    return "push" if late else "sum" if not nodes else "partial" if owned else "result", late, nodes

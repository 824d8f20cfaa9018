"""Which lane bounds the optimiser step, and what the others wait for: pure functions over the spans of all ranks.

The rule: an optimiser step is late by whatever keeps the learner. So at every moment between two steps, start at each grpo
lane. If it works, it bounds the step. If it waits, whoever it waits for does, or whom that one waits for, and so on to
the first that works. Where the chain reaches the episodes, the moment is divided among them: those being decided or queued for
it are inference's, those whose message is being handled are sampling's, the others are with the simulators, which are
processes of their own and no lane. A chain that bites its own tail, or ends in the wait for a disk, is `other`.

A lane is busy when it does not wait: collectives count as its work, as they do in ``lane/<lane>/busy_frac``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, pairwise
from typing import Literal, NamedTuple

from dvla.telemetry.lane_names import LANES
from dvla.telemetry.spans import Span

SIMULATORS, OTHER = "simulators", "other"
BOUNDS = (SIMULATORS, *LANES, OTHER)
"""Who can bound a step."""

_ADVICE = {
    SIMULATORS: "more simulator cores, light meshes (render.meshes=light) or cheaper pictures make it faster; "
    "a higher algo.max_staleness hides waits for single slow groups",
    "sampling": "more ranks that sample (placement.ratio), or longer chunks (model.num_action_chunks) make it faster",
    "inference": "more environments in a batch (runtime.num_envs), runtime.compile_inference, runtime.cuda_graphs or more "
    "ranks that infer (placement.ratio) make it faster",
    "grpo": "more ranks that train (placement.ratio), a larger algo.micro_batch_size, runtime.precision=bf16 or "
    "runtime.compile_learner make it faster",
    "param_dist": "fewer weights (model.lora_rank, model.freeze) or a higher algo.max_staleness make it faster",
    OTHER: "see what the lanes wait for: a checkpoint on its way to the disk, an evaluation",
}

LaneOfRank = tuple[int, str]
"""Rank and name of a lane."""


class Segment(NamedTuple):
    """A stretch of time in which a lane did one thing."""

    start_s: float
    end_s: float
    activity: Literal["busy", "waiting", "idle"]
    span: Span | None
    """The innermost span of work, or the wait; None for work between spans, and for idling."""


@dataclass(frozen=True, slots=True)
class LaneShare:
    """What a lane of a rank did; shares of the time, in [0, 1]."""

    rank: int
    lane: str
    busy: float
    waits: dict[str, float]
    """By what it waited for, longest first. What is left of 1 is its bubble too: it was another lane's turn."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """Where the time of some optimiser steps went."""

    start_s: float
    end_s: float
    num_steps: int
    first_version: int
    """Optimiser steps done when the first of these ended."""
    lanes: list[LaneShare]
    bounds: dict[str, float]
    """Share of the time that each of `BOUNDS` bounds the step, the largest first; mean over the ranks that train."""
    overlaps: dict[tuple[str, str], float]
    """Share of the time in which two lanes work at once: on one rank, or on two where no rank has both; their mean."""
    critical: list[tuple[float, float, str]]
    """When which of `BOUNDS` bounds the first training rank most: start, end, name."""


def segments(spans: Iterable[Span], *, takes_turns: bool = False) -> list[Segment]:
    """What one lane of one rank did from its first to its last span, without gaps.

    Args:
        spans: Nested or apart.
        takes_turns: Outside of its turns the lane idles.
    """
    ordered = sorted(spans, key=lambda span: (span.start_s, -span.end_s))
    found: list[Segment] = []
    nested: list[Span] = []
    now = ordered[0].start_s if ordered else 0.0

    def move_on(to: float) -> None:
        nonlocal now
        if to <= now:
            return
        state = next((span for span in reversed(nested) if span.category != "work"), None)
        work = nested[-1] if nested and nested[-1].category == "work" else None
        if state is not None and state.category == "wait":
            found.append(Segment(now, to, "waiting", state))
        elif takes_turns and state is None:
            found.append(Segment(now, to, "idle", None))
        else:
            found.append(Segment(now, to, "busy", work))
        now = to

    for span in ordered:
        while nested and nested[-1].end_s <= span.start_s:
            move_on(nested[-1].end_s)
            nested.pop()
        move_on(span.start_s)
        nested.append(span)
    while nested:
        move_on(nested[-1].end_s)
        nested.pop()
    return found


def lanes_between(spans: Sequence[Span], start_s: float, end_s: float) -> dict[LaneOfRank, list[Segment]]:
    """What each lane of each rank did between two times, those that did nothing then left out; in order of ranks and lanes.

    Args:
        spans: Of all lanes and ranks, in order of their start.
        start_s: Seconds since 1970.
        end_s: Likewise.
    """
    before: dict[LaneOfRank, Span] = {}  # the spans next to the window say that a lane was there at its edges
    after: dict[LaneOfRank, Span] = {}
    inside: defaultdict[LaneOfRank, list[Span]] = defaultdict(list)
    turns = set()
    for span in spans:
        key = span.rank, span.lane
        if span.lane not in LANES or span.name == "handle":  # a part of `collect`, which says how many are kept
            continue
        if span.category == "turn":
            turns.add(key)
        if span.end_s <= start_s:
            before[key] = span
        elif span.start_s >= end_s:
            after.setdefault(key, span)
        else:
            inside[key].append(span)
    lanes = {}
    for key in sorted({*before, *inside}, key=lambda key: (key[0], LANES.index(key[1]))):
        near = [*filter(None, [before.get(key)]), *inside[key], *filter(None, [after.get(key)])]
        found = [
            segment._replace(start_s=max(segment.start_s, start_s), end_s=min(segment.end_s, end_s))
            for segment in segments(near, takes_turns=key in turns)
            if segment.end_s > start_s and segment.start_s < end_s
        ]
        if found:
            lanes[key] = found
    return lanes


def steps_of(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """When each optimiser step ended, with the number of steps done then; of the first rank that trains."""
    ends = [span for span in spans if span.lane == "grpo" and span.name == "optimise"]
    rank = min((span.rank for span in ends), default=0)
    return sorted((span.end_s, int(span.args.get("version", 0))) for span in ends if span.rank == rank)


def last_steps(spans: Sequence[Span], max_spans: int) -> list[tuple[float, int]]:
    """As many of the last ends of steps (see `steps_of`) as have `max_spans` spans between them, but two, if there are two."""
    ends = steps_of(spans)
    starts = sorted(span.start_s for span in spans)
    earliest = starts[-max_spans] if 0 < max_spans < len(starts) else float("-inf")
    kept = [end for end in ends if end[0] >= earliest]
    return kept if len(kept) > 1 else ends[-2:]


def analyse(spans: Sequence[Span], steps: Sequence[tuple[float, int]]) -> Analysis | None:
    """Find out where the time between the first and the last of `steps` went; None without two of them.

    Args:
        spans: Of all lanes and ranks, in order of their start.
        steps: See `steps_of`.
    """
    if len(steps) < 2 or steps[-1][0] <= steps[0][0]:
        return None
    start_s, end_s = steps[0][0], steps[-1][0]
    running = {
        span.rank: int(span.args.get("running", 0))
        for span in spans
        if span.name == "collect" and span.end_s <= start_s
    }
    by_lane = lanes_between(spans, start_s, end_s)
    changes: list[tuple[float, LaneOfRank, Segment | None]] = []
    for key, of_lane in by_lane.items():
        changes += [(segment.start_s, key, segment) for segment in of_lane]
        if of_lane[-1].end_s < end_s:
            changes.append((of_lane[-1].end_s, key, None))  # the lane has ended
    changes.sort(key=lambda change: change[0])
    sweep = _Sweep(list(by_lane), running)
    moments = [*changes, (end_s, (0, ""), None)]
    for (now, key, segment), (until, *_) in pairwise(moments):
        sweep.change(key, segment)
        if until > now:
            sweep.pass_time(now, until)
    return sweep.result(start_s, end_s, num_steps=len(steps) - 1, first_version=steps[1][1])


class _Sweep:
    """Goes through time, and adds up."""

    def __init__(self, keys: list[LaneOfRank], running: dict[int, int]) -> None:
        self._keys = keys
        self._now: dict[LaneOfRank, Segment] = {}
        self._running = running  # rank -> episodes under way
        self._ranks = {lane: [rank for rank, name in keys if name == lane] for lane in LANES}
        self._pairs = [pair for lanes in combinations(LANES, 2) for pair in self._pairs_of(*lanes)]
        self._busy: defaultdict[LaneOfRank, float] = defaultdict(float)
        self._waits: defaultdict[LaneOfRank, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._both: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._bounds: defaultdict[str, float] = defaultdict(float)
        self._critical: list[tuple[float, float, str]] = []

    def _pairs_of(self, first: str, second: str) -> list[tuple[LaneOfRank, LaneOfRank]]:
        pairs = [((a, first), (b, second)) for a in self._ranks[first] for b in self._ranks[second]]
        return [pair for pair in pairs if pair[0][0] == pair[1][0]] or pairs

    def change(self, key: LaneOfRank, segment: Segment | None) -> None:
        """From now on a lane does something else; None: it has ended."""
        if segment is None:
            self._now.pop(key, None)
            return
        self._now[key] = segment
        if segment.span is not None and segment.span.name == "collect":
            self._running[key[0]] = int(segment.span.args.get("running", 0))

    def pass_time(self, now: float, until: float) -> None:
        """Nothing changes from `now` to `until`."""
        seconds = until - now
        for key, segment in self._now.items():
            if segment.activity == "busy":
                self._busy[key] += seconds
            elif segment.activity == "waiting" and segment.span is not None:
                self._waits[key][segment.span.name.lstrip("0123456789 ")] += seconds
        for a, b in self._pairs:
            if self._is_busy(a) and self._is_busy(b):
                self._both[a[1], b[1]] += seconds
        for number, rank in enumerate(self._ranks["grpo"]):
            bounds = self._bounds_of((rank, "grpo"), set())
            for who, share in bounds.items():
                self._bounds[who] += share * seconds
            if number == 0:
                self._critical.append((now, until, max(bounds, key=lambda who: bounds[who])))

    def _is_busy(self, key: LaneOfRank) -> bool:
        segment = self._now.get(key)
        return segment is not None and segment.activity == "busy"

    def _bounds_of(self, key: LaneOfRank, seen: set[LaneOfRank]) -> dict[str, float]:
        """Who keeps a lane, by share; `seen` are the lanes that wait for it."""
        rank, lane = key
        segment = self._now.get(key)
        whom = self._waits_for(key)
        if lane == "sampling" and segment is not None and whom != "grpo":
            return self._bounds_of_episodes(segment, rank)
        if self._is_busy(key):
            return {lane: 1.0}
        if whom is None:  # ended, or another lane's turn
            return {OTHER: 1.0}
        seen = {*seen, key}
        others = [other for other in self._whom(rank, whom) if other not in seen]
        if not others:  # all grpo lanes sit in a collective: that is their work
            return {"grpo": 1.0} if lane == whom == "grpo" else {OTHER: 1.0}
        # One that works keeps the others; of those that wait, one that waits for another lane.
        others.sort(key=lambda other: (not self._is_busy(other), self._waits_for(other) == other[1]))
        return self._bounds_of(others[0], seen)

    def _whom(self, rank: int, lane: str) -> list[LaneOfRank]:
        """The lanes that a rank can mean: its own; any rank's where it has none; those of all learners, who act together."""
        ranks = self._ranks.get(lane, [])
        return [(rank, lane)] if rank in ranks and lane != "grpo" else [(other, lane) for other in ranks]

    def _waits_for(self, key: LaneOfRank) -> str | None:
        segment = self._now.get(key)
        if segment is None or segment.activity != "waiting" or segment.span is None:
            return None
        return str(segment.span.args.get("whom", ""))

    def _bounds_of_episodes(self, segment: Segment, rank: int) -> dict[str, float]:
        """With whom the episodes of a sampling lane are, which is at `segment`."""
        parts = {}
        if segment.activity == "busy":
            args = segment.span.args if segment.span else {}
            parts["sampling"] = _share(args.get("workers"), self._running.get(rank, 0))
        deciding = next((key for key in self._whom(rank, "inference") if self._is_busy(key)), None)
        if deciding is not None:
            span = self._now[deciding].span
            asked = span.args["size"] + span.args.get("queued", 0) if span and "size" in span.args else None
            running = self._running.get(deciding[0]) or sum(self._running.values())  # it may decide for all ranks
            parts["inference"] = _share(asked, running)
        total = sum(parts.values())
        if segment.activity == "idle" and not parts:
            return {OTHER: 1.0}
        if segment.activity == "idle" or total >= 1:  # nothing is simulated during another lane's turn
            return {who: share / total for who, share in parts.items()}
        return {**parts, SIMULATORS: 1.0 - total}

    def result(self, start_s: float, end_s: float, *, num_steps: int, first_version: int) -> Analysis:
        """What has been added up."""
        wall_s = end_s - start_s
        num_learners = max(1, len(self._ranks["grpo"]))
        num_pairs = Counter((a[1], b[1]) for a, b in self._pairs)
        lanes = [
            LaneShare(
                rank=key[0],
                lane=key[1],
                busy=self._busy[key] / wall_s,
                waits=_largest_first(self._waits[key], wall_s),
            )
            for key in self._keys
        ]
        merged = []
        for who, stretch in groupby(self._critical, key=lambda moment: moment[2]):
            first, *rest = stretch
            merged.append((first[0], rest[-1][1] if rest else first[1], who))
        return Analysis(
            start_s=start_s,
            end_s=end_s,
            num_steps=num_steps,
            first_version=first_version,
            lanes=lanes,
            bounds=_largest_first(self._bounds, wall_s * num_learners),
            overlaps={pair: self._both[pair] / wall_s / count for pair, count in num_pairs.items()},
            critical=merged,
        )


def _share(part: float | None, whole: int) -> float:
    """`part` of `whole`, at most 1; all of it where one of them is not known."""
    return min(1.0, part / whole) if part is not None and whole > 0 else 1.0


def _largest_first(seconds: dict[str, float], whole: float) -> dict[str, float]:
    return {name: part / whole for name, part in sorted(seconds.items(), key=lambda item: -item[1])}


def describe(analysis: Analysis) -> list[str]:
    """The gist for a person, a sentence or two a line."""
    last = analysis.first_version + analysis.num_steps - 1
    seconds = analysis.end_s - analysis.start_s
    (who, share), *others = analysis.bounds.items()
    rest = ", ".join(f"{name} {_percent(part)}" for name, part in others if part >= 0.005)
    lines = [
        f"Optimiser steps {analysis.first_version} to {last} took {seconds:.3g} s. "
        f"{who} bounds them {_percent(share)} of the time{f' ({rest})' if rest else ''}: {_ADVICE[who]}."
    ]
    for lane in LANES:
        of_lane = [x for x in analysis.lanes if x.lane == lane]
        if not of_lane:
            continue
        waits: defaultdict[str, float] = defaultdict(float)
        for x in of_lane:
            for what, part in x.waits.items():
                waits[what] += part
        busy = sum(x.busy for x in of_lane) / len(of_lane)
        longest = list(_largest_first(waits, len(of_lane)).items())[:3]
        named = ", ".join(f"{_percent(part)} for {what}" for what, part in longest if part >= 0.005)
        lines.append(f"{lane} is busy {_percent(busy)}" + (f" and waits {named}." if named else "."))
    together = [(a, b, part) for (a, b), part in analysis.overlaps.items() if part >= 0.005]
    if together:
        named = ", ".join(f"{a} and {b} {_percent(part)}" for a, b, part in sorted(together, key=lambda x: -x[2])[:3])
        lines.append(f"At work at the same time: {named}.")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"

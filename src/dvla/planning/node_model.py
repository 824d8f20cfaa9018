"""The lanes of one node in simulated time, as `dvla.lanes` has them: what each does next, with what, and for whom it waits.

Nodes are alike, so one is played. Its lanes decide by the same rules as the real ones: admission and order of groups
(`TicketBook`), stages (`Stages`), batches (`BatchTimes`), who samples a group (`deal_groups`). All ranks of a kind are equally
fast. Not played: the search for the best number of environments in flight, evaluations, checkpoints, workers that fail.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dvla.config import Placement, Schedule
from dvla.lanes.balance import BatchTimes, deal_groups
from dvla.lanes.stages import Stages
from dvla.planes.tickets import TicketBook
from dvla.planning.simulated_time import Bell, Kernel, Process, Resource, Wait, Work

if TYPE_CHECKING:
    from dvla.config import Config
    from dvla.planning.profile import Profile
    from dvla.runtime.placement import Roles

_FOREVER = 10**9
_NUM_LENGTHS = 4093
"""Episodes after which lengths repeat themselves; a prime, so that groups do not."""


@dataclass(slots=True, eq=False)
class _Group:
    """A group under way."""

    id: int
    learner: Learner
    version: int
    lengths: tuple[int, ...]
    sampler: Sampler
    num_running: int = 0
    behavior_versions: int = 0
    """Added up over its decisions."""


@dataclass(slots=True, eq=False)
class _Episode:
    """An episode on environment `id`; also its request, as `Stages` knows it."""

    group: _Group
    id: int
    stage: int
    left: int
    """Decisions that are to be executed."""
    has_begun: bool = False


class Node:
    """What the lanes of the node share.

    Args:
        config: The run.
        profile: What the work costs.
        roles: Who does what, as ranks of this node.
        num_nodes: Nodes like this.
    """

    def __init__(self, config: Config, profile: Profile, roles: Roles, num_nodes: int) -> None:
        self.config, self.profile, self.roles = config, profile, roles
        self.is_serial = config.runtime.schedule is Schedule.serial
        num_learners = num_nodes * len(roles.training)
        self.num_slots = config.slots_per_sampler(num_learners, num_nodes * len(roles.sampling))
        self.groups_per_batch = config.groups_per_learner(num_learners)
        is_shared = not profile.is_batch_simulator or config.placement.name is not Placement.colocated
        has_room = self.num_slots >= len(roles.training) * config.algo.group_size
        self.can_move = config.moves_groups and len(roles.sampling) > 1 and is_shared and has_room
        """Whether any rank may sample for any other."""
        self.max_dropped = -(-config.algo.max_dropped_per_step // num_learners)
        self.cores = Resource(profile.cores or float("inf"))
        ranks = sorted({*roles.sampling, *roles.inference, *roles.training})
        self._devices = {rank: Resource(1.0) if profile.has_accelerators else self.cores for rank in ranks}
        self.kernel = Kernel([self.cores, *(self._devices.values() if profile.has_accelerators else ())])
        self.dice = random.Random(0)
        self.busy_s: dict[str, float] = defaultdict(float)
        """By lane, and for `simulators`, over all that there are."""
        self.counts: Counter[str] = Counter()
        """Decisions executed and trained, their staleness, groups."""
        self.staleness_max = 0.0
        self.step_ends: list[float] = []
        self._lengths = list(profile.episode_decisions) * -(-_NUM_LENGTHS // len(profile.episode_decisions))
        random.Random(0).shuffle(self._lengths)
        self.replicas = {rank: Replica(self, rank) for rank in roles.inference}
        self.samplers = {rank: Sampler(self, rank) for rank in roles.sampling}
        self.learners = {rank: Learner(self, rank) for rank in roles.training}
        self.published, self.publication = 0, Bell()
        self._meetings = 0
        self._present: list[int] = []
        self._met, self._all_there = 0, Bell()
        start = self.kernel.start
        for learner in self.learners.values():
            start(learner.run())
        for sampler in self.samplers.values():
            for worker in sampler.workers:
                start(worker.run())
        if not self.is_serial:
            for sampler in self.samplers.values():
                start(sampler.run())
            for replica in self.replicas.values():
                start(replica.run())
            start(self._distribute())

    def run(self, num_batches: int) -> None:
        """Play so many batches more."""
        end = len(self.step_ends) + num_batches
        self.kernel.run(lambda: len(self.step_ends) >= end)

    def work(self, who: str, resource: Resource, seconds: float) -> Process:
        """Work, and account for the time it took."""
        if seconds > 0:
            begin = self.kernel.now
            yield Work(resource, seconds)
            self.busy_s[who] += self.kernel.now - begin

    def device(self, rank: int) -> Resource:
        """What policy and learner of `rank` compute on."""
        return self._devices[rank]

    def lengths(self, group: int) -> tuple[int, ...]:
        """Decisions of the episodes of a group; the same in every placement."""
        size = self.config.algo.group_size
        return tuple(self._lengths[(group * size + member) % len(self._lengths)] for member in range(size))

    def meet(self, value: int) -> Process:
        """Wait for all training ranks; `largest` is then the largest value of them."""
        self._present.append(value)
        meeting = self._meetings
        if len(self._present) == len(self.roles.training):
            self._met, self._present = max(self._present), []
            self._meetings += 1
            self.kernel.ring(self._all_there)
        while self._meetings == meeting:
            yield Wait(self._all_there)

    @property
    def largest(self) -> int:
        """Of the values of the last meeting."""
        return self._met

    def _distribute(self) -> Process:
        """The param_dist lanes, which move together."""
        version = 0
        while True:
            while self.published < (version + 1) * len(self.learners):
                yield Wait(self.publication)
            yield from self.transfer()
            while any(replica.num_applied < version for replica in self.replicas.values()):
                yield Wait(self.publication)
            for replica in self.replicas.values():
                replica.num_arrived = version + 1
                self.kernel.ring(replica.bell)
            if version:
                for learner in self.learners.values():
                    learner.host_free += 1
                    self.kernel.ring(learner.bell)
            version += 1

    def transfer(self) -> Process:
        """Make the shards a whole version."""
        yield from self.work("param_dist", self.cores, self.profile.transfer_s)


class Worker:
    """A worker process: its environments in turn."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.orders: deque[_Episode] = deque()
        self.bell = Bell()

    def run(self) -> Process:
        """Execute orders, first come, first served."""
        node, profile = self._sampler.node, self._sampler.node.profile
        while True:
            while not self.orders:
                yield Wait(self.bell)
            episode = self.orders.popleft()
            seconds = profile.chunk.draw(0, node.dice) if episode.has_begun else profile.reset_s
            yield from node.work("simulators", node.cores, seconds)
            self._sampler.answer(episode)


class Sampler:
    """A sampling lane with its simulators."""

    def __init__(self, node: Node, rank: int) -> None:
        self.node, self.rank = node, rank
        runtime = node.config.runtime
        self._replica = node.replicas[node.roles.inference_of(rank)]
        self.is_batch = node.profile.is_batch_simulator
        self.workers = [] if self.is_batch else [Worker(self) for _ in range(runtime.num_workers)]
        self._envs_per_worker = runtime.num_envs // runtime.num_workers
        self._idle = list(range(runtime.num_envs))
        self._ordered: deque[_Group] = deque()
        self.num_open = 0
        self._free = node.num_slots
        self._held: Counter[Learner] = Counter()
        self._tickets: deque[tuple[_Group, int]] = deque()
        self._stages: Any = Stages(node.config.placement.stages)
        self.running: set[_Episode] = set()
        self.answers: deque[_Episode] = deque()
        self._resets: list[_Episode] = []  # of a batch simulator
        self._ready: list[_Episode] = []
        self.bell = Bell()

    def order(self, group: _Group) -> None:
        """Take the order to play a group."""
        self._ordered.append(group)
        self.num_open += 1
        self.node.kernel.ring(self.bell)

    def free(self, group: _Group) -> None:
        """Take back the slots of a group."""
        self._free += len(group.lengths)
        self._held[group.learner] -= 1
        self.node.kernel.ring(self.bell)

    def answer(self, episode: _Episode) -> None:
        """Hear that an environment has begun, or has executed a chunk."""
        if episode.has_begun:
            episode.left -= 1
            self.node.counts["decisions"] += 1
        episode.has_begun = True
        self.answers.append(episode)
        self.node.kernel.ring(self.bell)

    def act(self, episode: _Episode) -> None:
        """Let an environment execute its decision, or begin."""
        if self.is_batch:
            (self._ready if episode.has_begun else self._resets).append(episode)
            self.node.kernel.ring(self.bell)
        else:
            worker = self.workers[episode.id // self._envs_per_worker]
            worker.orders.append(episode)
            self.node.kernel.ring(worker.bell)

    def run(self) -> Process:
        """Begin what may begin, hear answers."""
        while True:
            self.dispatch()
            if self.is_batch:
                yield from self.simulate_batch()
            if self.answers:
                yield from self.handle(self.answers.popleft())
            elif not self._has_batch():
                yield Wait(self.bell)

    def _has_batch(self) -> bool:
        """Whether a batch simulator has something to do: to begin, or a chunk for which all have their actions."""
        num_observed = sum(episode.has_begun for episode in self.running)
        return bool(self._resets) or (bool(self._ready) and len(self._ready) == num_observed)

    def simulate_batch(self) -> Process:
        """A chunk of the whole batch, if all have their actions, then the resets."""
        if self.answers or not self._has_batch():
            return
        profile, num_observed = self.node.profile, sum(episode.has_begun for episode in self.running)
        acting = self._ready if len(self._ready) == num_observed else []
        begin, self._resets = self._resets, []
        if acting:
            self._ready = []
        seconds = profile.chunk.draw(self.node.config.runtime.num_envs, self.node.dice) if acting else 0.0
        yield from self.node.work("simulators", self.node.device(self.rank), seconds + profile.reset_s * len(begin))
        for episode in [*acting, *begin]:
            self.answer(episode)

    def dispatch(self) -> None:
        """Give tickets to idle environments."""
        while self._idle and (self._tickets or self._begin()):
            group, length = self._tickets.popleft()
            env = self._idle.pop(0)
            episode = _Episode(group, env, self._stages.of(env), length)
            self.running.add(episode)
            self.act(episode)

    def _begin(self) -> bool:
        roles, size = self.node.roles, self.node.config.algo.group_size
        sharing = roles.training if self.node.can_move else roles.learners_of(self.rank)
        for group in self._ordered:
            others = (learner for rank in sharing if (learner := self.node.learners[rank]) is not group.learner)
            without = sum(not self._held[other] for other in others)
            if self._free >= (1 + without) * size:
                self._ordered.remove(group)
                self._held[group.learner] += 1
                self._free -= size
                group.num_running = size
                self._tickets.extend((group, length) for length in group.lengths)
                return True
        return False

    def handle(self, episode: _Episode) -> Process:
        """Pass an observation on, or end an episode."""
        node = self.node
        yield from node.work("sampling", node.cores, node.profile.handle_s)
        if episode.left:
            requests = self._stages.asks(episode)
        else:
            self.running.remove(episode)
            self._idle.append(episode.id)
            self._idle.sort()
            group = episode.group
            group.num_running -= 1
            if not group.num_running:
                self.num_open -= 1
                group.learner.finished.append(group)
                node.kernel.ring(group.learner.bell)
            requests = self._stages.leaves(episode.id)
        if requests:
            self._replica.requests.extend((request, self) for request in requests)
            node.kernel.ring(self._replica.bell)


class Replica:
    """An inference lane."""

    def __init__(self, node: Node, rank: int) -> None:
        self._node, self._rank = node, rank
        runtime, stages = node.config.runtime, node.config.placement.stages
        num_envs = runtime.num_envs * len(node.roles.samplers_of(rank))
        self._max_batch = min(runtime.max_batch, -(-num_envs // (stages or 1)))
        self._max_wait_s = 0.0 if node.is_serial else runtime.max_wait_s
        self._times: BatchTimes | None = None
        if node.config.balances and stages is None and self._max_batch > 1:
            self._times = BatchTimes()
            for size in 2 * (1, self._max_batch):
                self._times.note(size, node.profile.decide.fixed_s + size * node.profile.decide.each_s)
            self._max_batch = self._times.largest_batch(self._max_batch)
        self.requests: deque[tuple[_Episode, Sampler]] = deque()
        self._queues: dict[int, deque[tuple[_Episode, Sampler]]] = {}
        self.num_arrived = self.num_applied = 0
        """Versions, the first one included."""
        self.versions: list[int] = []
        """Policy version of each that was published."""
        self.bell = Bell()

    def run(self) -> Process:
        """Apply weights, serve batches."""
        while True:
            yield from self.apply()
            if not (yield from self.serve()):
                yield Wait(self.bell)

    def apply(self) -> Process:
        """Take over the version that has arrived."""
        if self.num_applied < self.num_arrived:
            yield from self._node.work("inference", self._node.device(self._rank), self._node.profile.apply_s)
            self.num_applied += 1
            self._node.kernel.ring(self._node.publication)

    def serve(self) -> Any:
        """Decide for one batch; whether there was one."""
        self._collect()
        if not self._queues:
            return False
        stage, now = next(iter(self._queues)), self._node.kernel.now
        queue = self._queues[stage]
        deadline = now + self._max_wait_s
        while len(queue) < self._max_batch and (left := deadline - self._node.kernel.now) > 0:
            if self._times is not None:
                left = min(left, self._times.worth_waiting_s(len(queue), left))
            before = len(queue)
            yield Wait(self.bell, left)
            self._collect()
            if self._times is not None and len(queue) == before:
                break
        batch = [queue.popleft() for _ in range(min(len(queue), self._max_batch))]
        del self._queues[stage]
        if queue:
            self._queues[stage] = queue
        seconds = self._node.profile.decide.draw(len(batch), self._node.dice)
        yield from self._node.work("inference", self._node.device(self._rank), seconds)
        for episode, sampler in batch:
            episode.group.behavior_versions += self._version()
            sampler.act(episode)
        return True

    def _version(self) -> int:
        return self.versions[self.num_applied - 1] if self.num_applied else -1

    def _collect(self) -> None:
        early = []
        while self.requests:
            request = self.requests.popleft()
            if request[0].group.version > self._version():
                early.append(request)
            else:
                self._queues.setdefault(request[0].stage, deque()).append(request)
        self.requests.extend(early)


class Learner:
    """A grpo lane."""

    def __init__(self, node: Node, rank: int) -> None:
        self._node, self._rank = node, rank
        self._number = node.roles.training.index(rank)
        self._book = TicketBook(
            seed=0,
            learner=self._number,
            num_learners=len(node.roles.training),
            groups_per_batch=node.groups_per_batch,
            max_staleness=node.config.algo.max_staleness,
            num_tasks=1,
            num_batches=_FOREVER,
        )
        self.finished: list[_Group] = []
        self.host_free = 2
        self._version = 0
        self._dice = random.Random(rank)
        self.bell = Bell()

    def run(self) -> Process:
        """Train for ever."""
        node, algo, profile = self._node, self._node.config.algo, self._node.profile
        yield from self._publish()
        while True:
            self._order()
            held, parts, num_dropped, rest = [], [], 0, 0
            for index in range(node.groups_per_batch):
                group, num_dropped = yield from self._next_group(num_dropped)
                num_decisions = sum(group.lengths)
                whole, rest = divmod(rest + num_decisions, algo.micro_batch_size)
                sizes = [algo.micro_batch_size] * whole
                if rest and (index == node.groups_per_batch - 1 or not algo.keeps_batch):
                    sizes.append(rest)
                    rest = 0
                parts += sizes
                self._note_staleness(group, num_decisions)
                yield from self._train(sizes)
                if algo.keeps_batch:
                    held.append(group)
                else:
                    group.sampler.free(group)
            yield from self._optimise()
            for _ in range(1, algo.update_epochs):
                yield from self._train(parts)
                yield from self._optimise()
            for group in held:
                group.sampler.free(group)
            yield from self._publish()
            self._order()
            yield from node.work("grpo", node.cores, profile.report_s)
            yield from node.meet(0)
            if self._number == 0:
                node.step_ends.append(node.kernel.now)

    def _note_staleness(self, group: _Group, num_decisions: int) -> None:
        staleness = self._version * num_decisions - group.behavior_versions
        self._node.counts["staleness"] += staleness
        self._node.counts["trained_decisions"] += num_decisions
        self._node.staleness_max = max(self._node.staleness_max, staleness / num_decisions)

    def _train(self, sizes: list[int]) -> Process:
        """As many micro-batches as the training rank has that has most."""
        node = self._node
        yield from node.meet(len(sizes))
        rounds = node.largest
        yield from node.work("grpo", node.cores, node.profile.agree_s)
        for size in [*sizes, *[1] * (rounds - len(sizes))]:
            seconds = node.profile.gradient.draw(size, node.dice)
            yield from node.work("grpo", node.device(self._rank), seconds)

    def _optimise(self) -> Process:
        node = self._node
        yield from node.meet(0)
        yield from node.work("grpo", node.device(self._rank), node.profile.optimise_s)
        self._version += 1

    def _publish(self) -> Process:
        node = self._node
        while not node.is_serial and not self.host_free:
            yield Wait(self.bell)
        self.host_free -= 1
        yield from node.work("grpo", node.cores, node.profile.publish_s)
        if self._number == 0:
            for replica in node.replicas.values():
                replica.versions.append(self._version)
        node.published += 1
        node.kernel.ring(node.publication)
        if node.is_serial:
            yield from node.meet(0)
            yield from node.transfer()
            replica = node.replicas[self._rank]
            replica.num_arrived += 1
            yield from replica.apply()

    def _next_group(self, num_dropped: int) -> Any:
        """The next group, and how many the batch has dropped so far."""
        node = self._node
        while True:
            number = self._book.choose([group.id for group in self.finished])
            if number is None:
                yield from self._sample() if node.is_serial else (Wait(self.bell),)
                continue
            group = next(group for group in self.finished if group.id == number)
            self.finished.remove(group)
            node.counts["groups"] += 1
            if num_dropped >= node.max_dropped or self._dice.random() >= node.profile.dropped_share:
                self._book.take(number)
                return group, num_dropped
            num_dropped += 1
            self._book.drop(number)
            group.sampler.free(group)
            self._order()

    def _sample(self) -> Process:
        """All environments answer, then all requests are served (serial schedule)."""
        sampler, replica = self._node.samplers[self._rank], self._node.replicas[self._rank]
        sampler.dispatch()
        if sampler.is_batch:
            yield from sampler.simulate_batch()
        while len(sampler.answers) < len(sampler.running):
            yield Wait(sampler.bell)
        for episode in sorted(sampler.answers, key=lambda answer: answer.id):
            yield from sampler.handle(episode)
        sampler.answers.clear()
        while (yield from replica.serve()):
            pass

    def _order(self) -> None:
        """Order every group that may begin."""
        node, roles = self._node, self._node.roles
        numbers = []
        while (started := self._book.start_group(self._version // node.config.algo.update_epochs)) is not None:
            numbers.append(started[0])
        turn = numbers[0] // len(roles.training) if numbers else 0
        if node.can_move:
            step, first = len(roles.training), roles.sampling.index(roles.sampler_of(self._rank, turn)) - self._number
            loads = [float(sampler.num_open) for sampler in node.samplers.values()]
            dealt = deal_groups(step * len(numbers), loads, [1.0] * len(loads), first)[self._number :: step]
            chosen = [roles.sampling[index] for index in dealt]
        else:
            chosen = [roles.sampler_of(self._rank, number // len(roles.training)) for number in numbers]
        for number, rank in zip(numbers, chosen, strict=True):
            sampler = node.samplers[rank]
            sampler.order(_Group(number, self, self._version, node.lengths(number), sampler))

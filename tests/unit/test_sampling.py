"""The sampling lane by itself."""

from types import SimpleNamespace

from dvla.envs.batch_pool import Bell
from dvla.envs.messages import Kind, Record
from dvla.lanes import sampling
from dvla.lanes.sampling import SamplingLane
from dvla.lanes.stages import Stages
from dvla.planes.semaphore import StopFlag
from dvla.planes.shared_transport import SharedTransport, local_links
from dvla.planes.tickets import Ticket
from dvla.telemetry.lane_clock import LaneClock
from dvla.telemetry.trace import Tracer


class Simulators:
    """Whose episodes begin at once."""

    def __init__(self):
        self.workers, self.began = [Bell()], []

    def reset(self, env, slot, **_how):
        self.began.append(Record(Kind.observed, env, slot, 0))
        self.workers[0].ring()

    def receive(self, worker):
        worker.silence()
        records, self.began = self.began, []
        return records

    def generation(self, env):
        return 0

    def overdue(self):
        return []


class Orders:
    """As many episodes as asked for."""

    def __init__(self):
        self.left = 0

    def next(self):
        if not self.left:
            return None
        self.left -= 1
        return Ticket(self.left, 0, 0, task=0, seed=0), self.left


def test_pace_is_measured_only_while_no_environment_lacks_an_order(monkeypatch):
    """Else a pause of the orders passes for slow environments, and their number drifts."""
    monkeypatch.setattr(sampling, "_MEASURE_S", 0.0)
    stop, orders, paces = StopFlag(), Orders(), []
    limit = SimpleNamespace(limit=4, look=lambda pace: paces.append(pace) or 4)
    lane = SamplingLane(
        pool=Simulators(), sources=[orders], stages=Stages(None),
        learners=SharedTransport(0, [local_links(0, stop)[0]], stop, 1.0), home=0, ask=lambda _request: None, inferrer=0,
        replies=None, stop=stop, num_envs=5, limit=limit, max_worker_failures=0, wait_timeout_s=1.0,
        note_restart=lambda: None, clock=LaneClock(), tracer=Tracer(0, False).for_lane("sampling"),
    )  # fmt: skip
    orders.left = 3
    lane.step()
    assert paces == []
    orders.left = 1
    lane.step()
    (pace,) = paces
    assert pace > 0
    limit.limit = 3  # one more is in flight, until it ends
    lane._pool.workers[0].ring()
    lane.step()
    assert paces == [pace]

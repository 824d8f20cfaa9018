"""Two pools: their budgets, what they hold, and an error that says which one ran out and what to change."""

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from metric_tags import documented

from dvla.config import Config, ConfigError, EnvConfig, MemoryConfig
from dvla.envs.batch_in_pool import BatchInPool
from dvla.runtime.host_memory import HostMemory, cgroup_rooms
from dvla.runtime.memory import GIB, Memory, MemoryPoolError, Pool, Usage, budgets, is_out_of_memory

CPU = torch.device("cpu")
MODEL, ENVIRONMENT = Pool.model, Pool.environment


class FakeHost(HostMemory):
    """10 GiB free, 2 GiB taken by this process, half a GiB of them unused."""

    def __init__(self, free=10 * GIB):
        self.left = free

    def free(self):
        return self.left

    def own(self):
        return 2 * GIB

    def unused(self):
        return GIB // 2


class FakeGpu:
    """A GPU of 100 GiB, 1 GiB of it taken by others before the run; sizes in GiB."""

    def __init__(self):
        self.outside, self.model, self.simulator = 1, (0, 0), (0, 0)
        self.limits, self.inside = [], False

    def total(self):
        return 100 * GIB

    def occupied(self):
        return (self.outside + self.model[1] + self.simulator[1]) * GIB

    def torch_memory(self):
        return tuple((model + simulator) * GIB for model, simulator in zip(self.model, self.simulator, strict=True))

    def simulator_tensors(self):
        return tuple(size * GIB for size in self.simulator)

    def limit_torch(self, num_bytes):
        self.limits.append(num_bytes / GIB)

    @contextlib.contextmanager
    def route(self):
        assert not self.inside, "torch would refuse a pool that is in use"
        self.inside = True
        try:
            yield
        finally:
            self.inside = False


@pytest.fixture
def gpu():
    return FakeGpu()


def on_gpu(gpu, *, is_batch=True, model=60, environment=30, host=None):
    return Memory({MODEL: model * GIB, ENVIRONMENT: environment * GIB}, host or FakeHost(), gpu, is_batch=is_batch)


def on_cpu(model=12, environment=8, free=10):
    return Memory({MODEL: model * GIB, ENVIRONMENT: environment * GIB}, FakeHost(free * GIB), None, is_batch=False)


@pytest.mark.parametrize(
    ("fraction", "gib", "gpu", "is_batch", "model", "environment"),
    [
        (None, None, 100, True, 71.25, 23.75),  # of the 95 GiB that may be used, a quarter for the simulator
        (None, 20, 100, True, 75, 20),
        (0.7, None, 100, True, 70, 25),
        (0.5, 20, 100, True, 50, 20),
        (None, None, 100, False, 95, 16),
        (0.5, 8, 100, False, 50, 8),
        (None, None, None, False, 16, 16),  # no limits but the machine's
        (None, 4, None, False, 12, 4),
        (0.75, None, None, False, 12, 4),
        (0.5, 2, None, False, 8, 2),
    ],
)
def test_budgets(fraction, gib, gpu, is_batch, model, environment):
    config = MemoryConfig(model_fraction=fraction, environment_gib=gib)
    found = budgets(config, gpu=gpu and gpu * GIB, host=16 * GIB, is_batch=is_batch)
    assert {pool: size / GIB for pool, size in found.items()} == {MODEL: model, ENVIRONMENT: environment}


@pytest.mark.parametrize(
    ("fraction", "gib", "gpu", "is_batch", "place"),
    [
        (0.8, 30, 100, True, "the GPU's 100.00 GiB"),
        (0.96, None, 100, True, "the GPU's 100.00 GiB"),
        (None, 96, 100, True, "the GPU's 100.00 GiB"),
        (None, 17, 100, False, "this rank's 16.00 GiB of host memory"),
        (None, 16, None, False, "this rank's 16.00 GiB of host memory"),
        (1.0, None, None, False, "this rank's 16.00 GiB of host memory"),
    ],
)
def test_budgets_that_do_not_fit_are_refused(fraction, gib, gpu, is_batch, place):
    config = MemoryConfig(model_fraction=fraction, environment_gib=gib)
    with pytest.raises(MemoryPoolError, match=rf"memory.model_fraction=.* memory.environment_gib=.* into {place}"):
        budgets(config, gpu=gpu and gpu * GIB, host=16 * GIB, is_batch=is_batch)


@given(
    st.none() | st.floats(0.01, 1.0),
    st.none() | st.floats(0.01, 200.0),
    st.none() | st.integers(8, 200),
    st.integers(1, 500),
    st.booleans(),
)
def test_budgets_never_promise_more_than_there_is(fraction, gib, gpu, host, is_batch):
    config = MemoryConfig(model_fraction=fraction, environment_gib=gib)
    is_batch = is_batch and gpu is not None
    try:
        found = budgets(config, gpu=gpu and gpu * GIB, host=host * GIB, is_batch=is_batch)
    except MemoryPoolError:
        assert (fraction, gib) != (None, None)
        return
    assert 0 < found[MODEL] <= (gpu or host) * GIB
    assert 0 < found[ENVIRONMENT] <= (gpu if is_batch else host) * GIB
    if is_batch or (gpu is None and (fraction, gib) != (None, None)):
        assert found[MODEL] + found[ENVIRONMENT] <= (gpu or host) * GIB


@pytest.mark.parametrize(("key", "value"), [("model_fraction", 0), ("model_fraction", 1.1), ("environment_gib", 0)])
def test_settings_that_cannot_work_are_refused_by_key(key, value):
    with pytest.raises(ConfigError, match=f"memory.{key} must"):
        MemoryConfig(**{key: value})


def test_fragmentation():
    assert Usage(used=6, reserved=8, budget=10).fragmentation == 0.25
    assert Usage(used=0, reserved=0, budget=10).fragmentation == 0.0


def test_usage_on_a_gpu_with_a_batch_simulator(gpu):
    memory = on_gpu(gpu)
    gpu.outside, gpu.model, gpu.simulator = 1 + 6, (15, 20), (1, 4)
    values = memory.usage()
    assert values == {
        "memory/model/used_bytes": 15 * GIB,
        "memory/model/reserved_bytes": 20 * GIB,
        "memory/model/budget_bytes": 60 * GIB,
        "memory/model/fragmentation": 0.25,
        "memory/environment/used_bytes": 7 * GIB,
        "memory/environment/reserved_bytes": 10 * GIB,
        "memory/environment/budget_bytes": 30 * GIB,
        "memory/environment/fragmentation": 0.3,
    }
    assert all(any(pattern.fullmatch(tag) for pattern in documented()) for tag in values)


def test_usage_on_a_gpu_whose_simulators_are_processes(gpu):
    memory = on_gpu(gpu, is_batch=False)
    gpu.model = (15, 20)
    with memory.environment(3 * GIB):
        assert not gpu.inside
    values = memory.usage()
    assert values["memory/model/reserved_bytes"] == 20 * GIB
    assert values["memory/environment/used_bytes"] == values["memory/environment/reserved_bytes"] == 3 * GIB
    assert set(gpu.limits) == {60}


def test_usage_on_a_cpu():
    memory = on_cpu()
    memory.claim(MODEL, "host buffers", GIB)
    with memory.environment(3 * GIB):
        pass
    values = memory.usage()
    assert values["memory/model/reserved_bytes"] == 3 * GIB
    assert values["memory/model/used_bytes"] == 2.5 * GIB
    assert values["memory/model/fragmentation"] == pytest.approx(1 / 6)
    assert values["memory/environment/used_bytes"] == 3 * GIB
    assert values["memory/environment/fragmentation"] == 0
    assert set(values) == set(on_gpu(FakeGpu()).usage())  # the same tags everywhere


def test_the_model_has_a_hard_limit_and_the_simulator_s_tensors_come_on_top(gpu):
    memory = on_gpu(gpu)
    assert gpu.limits == [60]
    with memory.environment():
        assert gpu.inside
        assert gpu.limits[-1] == 60 + 30
        gpu.outside, gpu.simulator = 1 + 6, (1, 4)
    assert not gpu.inside
    assert gpu.limits[-1] == 60 + 4
    with memory.environment():  # physics took 6 of the simulator's 30
        assert gpu.limits[-1] == 60 + 24
        gpu.simulator = (1, 5)
    memory.usage()
    assert gpu.limits[-1] == 60 + 5


def test_slots_that_do_not_fit_beside_the_simulator_are_refused_before_they_are_made(gpu):
    memory = on_gpu(gpu)
    gpu.outside = 1 + 20
    expected = (
        r"the environment pool ran out of memory on the GPU: 20.00 GiB.* of a budget of 30.00 GiB \(11.00 GiB more"
    )
    expected += r".*runtime.num_envs.*memory.environment_gib"
    with pytest.raises(MemoryPoolError, match=expected), memory.environment(11 * GIB):
        pytest.fail("the slots were made")
    with memory.environment(10 * GIB):
        pass


def test_host_memory_is_claimed_before_it_is_taken():
    memory = on_cpu(model=12, environment=8, free=10)
    expected = (
        r"the environment pool ran out of memory on the host: .*episode slots would take 9.00 GiB more, 8.00 GiB are"
    )
    with pytest.raises(MemoryPoolError, match=expected), memory.environment(9 * GIB):
        pytest.fail("the slots were made")
    with memory.environment(5 * GIB):
        pass
    with pytest.raises(MemoryPoolError, match=r"take 4.00 GiB more, 3.00 GiB are left"), memory.environment(4 * GIB):
        pytest.fail("the slots were made")
    expected = r"the model pool ran .*host buffers would take 10.50 GiB more, 10.00 GiB are left.*memory.model_fraction"
    with pytest.raises(MemoryPoolError, match=expected):
        memory.claim(MODEL, "host buffers", int(10.5 * GIB))


def test_budgets_of_a_gpu_do_not_bind_the_host_but_its_memory_does(gpu):
    memory = on_gpu(gpu, host=FakeHost(5 * GIB))
    gpu.model = (59, 60)
    memory.claim(MODEL, "host buffers", 4 * GIB)
    with pytest.raises(MemoryPoolError, match=r"host buffers would take 6.00 GiB more, 5.00 GiB are left"):
        memory.claim(MODEL, "host buffers", 6 * GIB)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("PxgCudaDeviceMemoryAllocator fail to allocate memory 71303168 bytes!! Result = 2"),
        RuntimeError("vk::Device::allocateMemoryUnique: ErrorOutOfDeviceMemory"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_a_simulator_without_memory_blames_its_pool(gpu, error):
    memory = on_gpu(gpu)
    expected = r"the environment pool ran out .*runtime.num_envs"
    with pytest.raises(MemoryPoolError, match=expected) as raised, memory.environment():
        raise error
    assert raised.value.__cause__ is error
    assert str(error) in str(raised.value)
    assert memory.explain(raised.value) is raised.value
    assert not gpu.inside
    assert gpu.limits[-1] == 60


def test_other_errors_of_the_simulator_pass(gpu):
    for memory in (on_gpu(gpu), on_cpu()):
        with pytest.raises(ValueError, match="unknown"), memory.environment():
            raise ValueError("unknown")


def test_out_of_memory_elsewhere_blames_the_model(gpu):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    error.add_note("in lane grpo")
    gpu.model = (55, 60)
    explained = on_gpu(gpu).explain(error)
    assert isinstance(explained, MemoryPoolError)
    assert str(explained).startswith(
        "the model pool ran out of memory on the GPU: 55.00 GiB in use and 5.00 GiB kept of a budget of 60.00 GiB (CUDA out of"
    )
    for key in ("algo.micro_batch_size", "runtime.precision", "memory.model_fraction"):
        assert key in str(explained)
    assert explained.__cause__ is error
    assert explained.__notes__ == ["in lane grpo"]


def test_a_physics_engine_beyond_its_budget_is_to_blame(gpu):
    memory = on_gpu(gpu)
    gpu.outside = 1 + 31
    explained = memory.explain(torch.OutOfMemoryError("CUDA out of memory."))
    assert str(explained).startswith("the environment pool ran out of memory on the GPU: 31.00 GiB in use")


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()]
)
def test_host_memory_that_runs_out_is_the_model_s_on_a_cpu_only(gpu, error):
    assert is_out_of_memory(error)
    assert str(on_cpu().explain(error)).startswith("the model pool ran out of memory on the host: 1.50 GiB in use")
    assert on_gpu(gpu).explain(error) is error


def test_what_is_no_lack_of_memory_stays_as_it_is(gpu):
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert on_gpu(gpu).explain(error) is error
    assert on_cpu().explain(error) is error


def test_a_cpu_s_pools_open_with_the_machine_s_memory():
    memory = Memory.open(Config(memory=MemoryConfig(environment_gib=0.001)), CPU, 2)
    values = memory.usage()
    assert values["memory/environment/budget_bytes"] == int(0.001 * GIB)
    assert 0 < values["memory/model/used_bytes"] <= values["memory/model/reserved_bytes"]
    assert values["memory/model/reserved_bytes"] < values["memory/model/budget_bytes"]
    expected = r"the environment pool .* a budget of 1.0 MiB .* take 2.0 MiB more, 1.0 MiB are left"
    with pytest.raises(MemoryPoolError, match=expected), memory.environment(2 * 2**20):
        pytest.fail("the slots were made")


@pytest.mark.parametrize(
    ("backend", "simulates", "limits"), [("gpu", True, 71.25), ("gpu", False, 95), ("cpu", True, 95)]
)
def test_only_ranks_with_a_batch_simulator_leave_room_for_it(monkeypatch, gpu, backend, simulates, limits):
    monkeypatch.setattr("dvla.runtime.memory.GpuMemory", lambda device: gpu)
    config = Config(env=EnvConfig(options={"sim_backend": backend}))
    memory = Memory.open(config, torch.device("cuda", 0), 1, simulates=simulates)
    assert gpu.limits == [limits]
    with memory.environment():
        assert gpu.inside == (limits < 95)


def test_a_process_knows_what_it_took():
    host = HostMemory()
    before = host.own()
    block = bytearray(64 * 2**20)
    block[:] = b"x" * len(block)
    assert host.own() - before >= len(block)
    assert 0 <= host.unused() <= host.own() + len(block)
    assert host.free() > 0


def test_limits_of_cgroups_count(tmp_path):
    def group(folder, **files):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)

    group(tmp_path / "jobs" / "one", memory__max="max\n", memory__current="500\n")
    group(tmp_path / "jobs", memory__max="3000\n", memory__current="1000\n", memory__stat="file 9\ninactive_file 300\n")
    group(
        tmp_path / "memory" / "job",
        memory__limit_in_bytes="2000\n",
        memory__usage_in_bytes="1500\n",
        memory__stat="inactive_file 7\ntotal_inactive_file 100\n",
    )
    own = tmp_path / "own"
    own.write_text("4:memory:/job/not/seen/in/here\n3:cpu,cpuacct:/x\n0::/jobs/one\n")
    assert sorted(cgroup_rooms(own, tmp_path)) == [600, 2300]
    assert list(cgroup_rooms(tmp_path / "none", tmp_path)) == []


def test_all_a_batch_simulator_does_it_does_in_its_pool():
    calls, inside = [], []

    @contextlib.contextmanager
    def pool():
        inside.append(True)
        yield
        inside.pop()

    class Simulator:
        spec, num_envs, device = "spec", 3, CPU

        def __getattr__(self, name):
            def call(*args):
                calls.append((name, args, len(inside)))
                return name

            return call

    def create():
        calls.append(("create", (), len(inside)))
        return Simulator()

    env = BatchInPool(create, pool)
    assert (env.spec, env.num_envs, env.device) == ("spec", 3, CPU)
    assert (env.reset(1, 0, 7), env.step("actions"), env.observe()) == ("reset", "step", "observe")
    env.close()
    assert calls == [
        ("create", (), 1), ("reset", (1, 0, 7), 1), ("step", ("actions",), 1), ("observe", (), 1), ("close", (), 0),
    ]  # fmt: skip

"""The policy server from a client's side: the protocol, errors, several clients, the end."""

import contextlib
import threading
import urllib.request

import numpy as np
import pytest
import torch
from test_robot_policy import OBSERVATION, make
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from dvla.config import ConfigError
from dvla.serving.array_messages import pack, unpack
from dvla.serving.policy_server import served


@pytest.fixture
def server():
    """The policy and the port."""
    policy, robot = make()
    with served(robot, "127.0.0.1", 0) as port:
        yield policy, port


def ask(connection, obs):
    connection.send(pack(obs))
    return connection.recv()


def test_a_client_is_greeted_and_answered(server):
    _, port = server
    with connect(f"ws://127.0.0.1:{port}") as client:
        greeting = unpack(client.recv())
        assert greeting["prompts"] == ["push it", "pull it"]
        assert greeting["observation_keys"][1] == ["wrist", "observation/wrist_image"]
        first, second = (unpack(ask(client, OBSERVATION)) for _ in range(2))
    assert (first["actions"].shape, first["actions"].dtype) == ((2, 3), np.float32)
    assert (first["server_timing"].keys(), second["server_timing"].keys()) == (
        {"infer_ms"},
        {"infer_ms", "prev_total_ms"},
    )
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as answer:
        assert answer.read() == b"OK\n"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pack({"prompt": "push it"}), "no 'agentview' or 'observation/image'"),
        (pack(OBSERVATION | {"state": [1]}), "state must be 8"),
        (b"\xc1", "Traceback"),
        (pack([1]), "Traceback"),
        ("text", "an observation must be a binary message"),
    ],
)
def test_an_error_is_told_with_its_traceback_and_others_are_served_on(server, message, words):
    _, port = server
    with connect(f"ws://127.0.0.1:{port}") as other, connect(f"ws://127.0.0.1:{port}") as client:
        client.recv()
        other.recv()
        client.send(message)
        told = client.recv()
        assert isinstance(told, str)
        assert words in told
        with pytest.raises(ConnectionClosed) as closed:
            client.recv()
        assert closed.value.rcvd.code == 1011
        assert "actions" in unpack(ask(other, OBSERVATION))


def test_two_clients_are_never_answered_at_the_same_time(server):
    policy, port = server
    act, meeting, met = policy.act, threading.Barrier(2), []

    def watched(obs, keys, *, greedy=False):
        with contextlib.suppress(threading.BrokenBarrierError):
            met.append(meeting.wait(0.3))
        return act(obs, keys, greedy=greedy)

    policy.act = watched
    with connect(f"ws://127.0.0.1:{port}") as one, connect(f"ws://127.0.0.1:{port}") as two:
        for client in (one, two):
            client.recv()
            client.send(pack(OBSERVATION))
        assert all("actions" in unpack(client.recv()) for client in (one, two))
    assert met == []


def test_a_page_in_a_browser_is_refused(server):
    with pytest.raises(InvalidStatus, match="403"), connect(f"ws://127.0.0.1:{server[1]}", origin="http://a.example"):
        pass


def test_the_end_closes_connections_and_threads():
    before = threading.active_count()
    with contextlib.ExitStack() as clients:
        with served(make()[1], "127.0.0.1", 0) as port:
            client = clients.enter_context(connect(f"ws://127.0.0.1:{port}"))
            client.recv()
        with pytest.raises(ConnectionClosed) as closed:
            client.recv()
        assert closed.value.rcvd.code == 1001
    assert threading.active_count() == before


def test_a_port_in_use_is_named(server):
    with (
        pytest.raises(ConfigError, match=f"port={server[1]}: cannot listen"),
        served(make()[1], "127.0.0.1", server[1]),
    ):
        pass


def test_the_client_of_openpi_gets_actions(server):
    pytest.importorskip(
        "openpi_client.websocket_client_policy", reason="pip install --no-deps openpi-client==0.1.2 (asks for NumPy 1)"
    )
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    policy, port = server
    client = WebsocketClientPolicy("127.0.0.1", port)
    assert client.get_server_metadata()["action_dim"] == 3
    of_libero = {
        "observation/image": np.full((224, 224, 3), 7, np.uint8),
        "observation/wrist_image": np.zeros((224, 224, 3), np.uint8),
        "observation/state": np.ones(8),
        "prompt": "pull it",
    }
    answer = client.infer(of_libero)
    np.testing.assert_array_equal(answer["actions"], np.full((2, 3), 8, np.float32))
    assert torch.equal(policy.asked.images[0, 0], torch.full((224, 224, 3), 7, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*prompt must be one of"):
        client.infer(of_libero | {"prompt": "dance"})

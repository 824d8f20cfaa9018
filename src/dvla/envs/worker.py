"""A worker process: runs its environments in turn, straight into the rank's episode slots.

Started by `dvla.envs.pool` as ``python -m dvla.envs.worker FD`` with one end of a packet socket. It first receives what to
build, answers with the environments' `EnvSpec`, receives the slot memory, and then serves until the socket closes. It
steps whole action chunks, stops the moment an episode ends, and renders once per chunk, only if another decision follows;
an episode that is filmed is rendered at every step.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import math
import socket
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dvla.envs.errors import SimulationError
from dvla.envs.messages import MAX_PACKET, Kind, Record, unpack
from dvla.envs.registry import environment_class
from dvla.planes.slots import SlotField, layout_bytes, map_memory, slot_arrays
from dvla.runtime.processes import die_with_parent, set_title

if TYPE_CHECKING:
    from dvla.envs.film import EpisodeFilm
    from dvla.envs.protocol import Environment


class Episode:
    """One environment and the episode it is in."""

    def __init__(
        self, env: Environment, slots: dict[str, np.ndarray], *, terminate_on_success: bool, videos: Path | None
    ) -> None:
        self._env = env
        self._slots = slots
        self._terminate_on_success = terminate_on_success
        self._max_steps = env.spec.max_episode_steps
        self._videos = videos
        self._film: EpisodeFilm | None = None
        self._steps = 0

    def reset(self, order: Record) -> None:
        """Begin the episode of a ticket and observe its initial state."""
        slots, slot = self._slots, order.slot
        slots["beat"][slot] = time.monotonic()
        self.close()
        initial = self._env.reset(order.task, order.seed)
        slots["ticket"][slot] = order.ticket
        slots["task"][slot] = order.task
        slots["num_decisions"][slot] = 0
        slots["success"][slot] = 0
        slots["initial_state"][slot] = np.frombuffer(hashlib.blake2b(initial, digest_size=16).digest(), np.uint8)
        self._steps = 0
        self._env.observe(slots["images"][slot, 0], slots["state"][slot, 0])
        if order.kind is Kind.film and self._videos is not None:
            from dvla.envs.film import EpisodeFilm  # brings the video codecs, which most workers never need

            name = f"task{order.task:02d}_seed{order.seed:03d}"
            self._film = EpisodeFilm(self._videos / f"step_{order.decision:06d}" / name, self._env)
            self._film.add()

    def act(self, slot: int, decision: int) -> bool:
        """Run the chunk of `decision`; True when the episode is over, else the next observation lies in the slot."""
        slots = self._slots
        reward, executed, over = 0.0, 0, False
        for action in slots["actions"][slot, decision]:
            slots["beat"][slot] = time.monotonic()
            step = self._env.step(action)
            slots["step_rewards"][slot, decision, executed] = step.reward
            executed += 1
            self._steps += 1
            reward += step.reward
            if step.success:
                slots["success"][slot] = 1
            if self._film is not None:
                self._film.add()
            over = step.terminated or self._steps >= self._max_steps or (step.success and self._terminate_on_success)
            if over:
                break
        if not math.isfinite(reward):
            raise SimulationError(f"the rewards of a chunk add up to {reward}: look at the environment's step")
        slots["executed_steps"][slot, decision] = executed
        slots["rewards"][slot, decision] = reward
        slots["num_decisions"][slot] = decision + 1
        if not over:
            slots["beat"][slot] = time.monotonic()
            self._env.observe(slots["images"][slot, decision + 1], slots["state"][slot, decision + 1])
        elif self._film is not None:
            self._film.close("success" if slots["success"][slot] else "failure")
            self._film = None
        return over

    def close(self) -> None:
        """Finish the video of an episode that was broken off."""
        if self._film is not None:
            self._film.close("stopped")
            self._film = None


_GATHER_S = 0.001
"""Seconds an answer may wait for others, where all orders take less."""


def build(order: dict[str, Any]) -> list[Environment]:
    """Make the environments of a worker."""
    make = environment_class(order["env"])
    return [make(**order["arguments"]) for _ in range(order["num_envs"])]


def serve(link: socket.socket, episodes: list[Episode]) -> None:
    """Obey orders until the rank closes the link.

    Answers of simulators that take next to nothing go together: to take one in costs the rank more than to simulate it.
    """
    slowest = 2 * _GATHER_S  # order of late
    while packet := link.recv(MAX_PACKET):
        orders, answers = unpack(packet)[0], []
        sent = time.monotonic()
        for number, order in enumerate(orders, 1):
            episode, begin = episodes[order.env], time.monotonic()
            if order.kind in (Kind.reset, Kind.film):
                episode.reset(order)
                answer = Record(Kind.observed, order.env, order.slot, 0)
            elif episode.act(order.slot, order.decision):
                answer = Record(Kind.finished, order.env, order.slot, order.decision)
            else:
                answer = Record(Kind.observed, order.env, order.slot, order.decision + 1)
            now = time.monotonic()
            slowest = max(now - begin, 0.98 * slowest)
            answers.append(replace(answer, seconds=now - begin).pack())
            if max(now - sent, slowest) >= _GATHER_S or number == len(orders):
                link.send(b"".join(answers))
                answers, sent = [], now


def main() -> None:
    """Entry of the process."""
    die_with_parent()
    faulthandler.enable()  # a crash, or the rank's SIGABRT after a hang, leaves the stack in this worker's log
    link = socket.socket(fileno=int(sys.argv[1]))
    environments: list[Environment] = []
    episodes: list[Episode] = []
    try:
        order = json.loads(link.recv(MAX_PACKET))
        set_title(order["title"])
        environments = build(order)
        link.send(json.dumps(asdict(environments[0].spec)).encode())
        packet, descriptors, _, _ = socket.recv_fds(link, MAX_PACKET, 1)
        if not packet:
            return
        layout = [SlotField(name, tuple(shape), dtype, offset) for name, shape, dtype, offset in json.loads(packet)]
        slots = slot_arrays(map_memory(descriptors[0], layout_bytes(layout)), layout)
        videos = Path(order["videos"]) if order["videos"] else None
        episodes = [
            Episode(env, slots, terminate_on_success=order["terminate_on_success"], videos=videos)
            for env in environments
        ]
        serve(link, episodes)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the rank is gone; there is nobody left to tell
    except BaseException as error:
        text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        sys.stderr.write(text)  # to this worker's log file
        link.send(Record(Kind.failed, 0, 0).pack() + text.encode()[: MAX_PACKET // 2])
        raise SystemExit(1) from error
    finally:
        for episode in episodes:
            episode.close()
        for env in environments:
            env.close()


if __name__ == "__main__":
    main()

import threading

import pytest

from dvla.planes.semaphore import Channel, Semaphore, StopFlag, Stopped, WaitTimeoutError, wait_any


def test_permits_are_counted():
    semaphore = Semaphore("x", 2, StopFlag(), 1.0)
    assert semaphore.value() == 2
    assert semaphore.try_acquire()
    assert semaphore.try_acquire()
    assert not semaphore.try_acquire()
    semaphore.release(3)
    assert semaphore.value() == 3
    semaphore.acquire()
    assert semaphore.value() == 2


def test_a_wait_ends_with_the_names_of_who_waited_for_what():
    semaphore = Semaphore("host_free", 0, StopFlag(), 0.01)
    errors = []

    def wait():
        try:
            semaphore.acquire("a buffer")
        except WaitTimeoutError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait, name="dvla-grpo")
    thread.start()
    thread.join()
    (text,) = errors
    assert all(part in text for part in ("lane grpo", "`host_free`", "a buffer", "runtime.wait_timeout_s"))


def test_a_stop_ends_every_wait_at_once():
    stop = StopFlag()
    semaphore, channel = Semaphore("a", 0, stop, 3600), Channel("b", 1, stop, 3600)
    ended = []

    def wait(acquire):
        with pytest.raises(Stopped):
            acquire()
        ended.append(1)

    threads = [threading.Thread(target=wait, args=(call,)) for call in (semaphore.acquire, channel.get)]
    for thread in threads:
        thread.start()
    stop.set()
    for thread in threads:
        thread.join(10)
    assert len(ended) == 2


def test_a_stopped_semaphore_gives_no_permit():
    stop = StopFlag()
    semaphore = Semaphore("a", 1, stop, 1.0)
    stop.set()
    with pytest.raises(Stopped):
        semaphore.acquire()


def test_a_channel_is_first_in_first_out_and_bounded():
    channel = Channel("groups", 2, StopFlag(), 1.0)
    channel.put(1)
    channel.put(2)
    with pytest.raises(OverflowError, match="groups"):
        channel.put(3)
    assert [channel.get(), channel.try_get(), channel.try_get()] == [1, 2, None]


def test_wait_any_tells_readable_sources_without_taking():
    stop = StopFlag()
    first, second = Semaphore("a", 0, stop, 1.0), Semaphore("b", 0, stop, 1.0)
    assert not wait_any([first, second], 0)
    second.release()
    assert wait_any([first, second], 10)
    assert second.value() == 1


def test_every_item_passes_between_threads_exactly_once():
    channel = Channel("x", 1000, StopFlag(), 10.0)
    seen = []

    def take():
        seen.extend(channel.get() for _ in range(500))

    consumer = threading.Thread(target=take)
    consumer.start()
    for item in range(500):
        channel.put(item)
    consumer.join()
    assert seen == list(range(500))

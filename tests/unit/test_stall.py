"""When a run stands still, and who is to blame."""

from dvla.runtime.stall import LaneReport, Stillness, culprit


def test_looks_without_a_change_are_counted_for_each_number():
    still = Stillness()
    assert still.look({"a": 1, "b": 1}) == {"a": 0, "b": 0}
    assert still.look({"a": 1, "b": 2}) == {"a": 1, "b": 0}
    assert still.look({"a": 1}) == {"a": 2}  # b has left
    assert still.look({"a": 2, "b": 2, "c": 0}) == {"a": 0, "b": 1, "c": 0}


def waits(rank, lane, whom, what="something"):
    return LaneReport(rank, lane, "waiting", what, whom, 70.0)


def works(rank, lane, what=""):
    return LaneReport(rank, lane, "busy", what, "", 90.0)


def healthy(rank):
    """Lanes that wait for what grpo is to do."""
    return [
        waits(rank, "sampling", "grpo", "orders"),
        waits(rank, "inference", "sampling", "requests"),
        waits(rank, "param_dist", "grpo", "published"),
    ]


def test_the_lane_that_works_by_itself_is_to_blame_with_the_chain_of_those_it_holds_up():
    reports = [
        waits(0, "grpo", "sampling", "a finished group"),
        waits(0, "sampling", "inference", "4 simulators"),
        works(0, "inference", "decide"),
        waits(0, "param_dist", "grpo", "published"),
    ]
    assert culprit(reports, []) == (
        "lane inference of rank 0 (busy, decide) has not got on for 90 s; "
        "lane sampling of rank 0 (waiting, 4 simulators) waits for lane inference of rank 0; "
        "lane grpo of rank 0 (waiting, a finished group) waits for lane sampling of rank 0"
    )


def test_the_chain_leads_to_another_rank():
    reports = [*healthy(0), waits(0, "grpo", "grpo", "collective: agree"), *healthy(1), works(1, "grpo")]
    assert culprit(reports, []) == (
        "lane grpo of rank 1 (busy) has not got on for 90 s; "
        "lane grpo of rank 0 (waiting, collective: agree) waits for lane grpo of rank 1"
    )


def test_simulators_that_never_answer_are_blamed_on_the_lane_that_waits_for_them():
    reports = [waits(0, "grpo", "sampling"), waits(0, "sampling", "", "4 simulators")]
    assert culprit(reports, []).startswith("lane sampling of rank 0 (waiting, 4 simulators) has not got on")


def test_a_silent_rank_is_to_blame_whatever_its_lanes_say_later():
    reports = [*healthy(0), waits(0, "grpo", "grpo", "collective: agree"), *healthy(1), works(1, "grpo")]
    reports += [works(0, "sampling")]  # not even a lane that works elsewhere
    said = culprit(reports, [1])
    assert said.startswith("rank 1 was silent")
    assert said.endswith("; lane grpo of rank 0 (waiting, collective: agree) waits for lane grpo of rank 1")
    assert culprit(reports[:4], [1]) == "rank 1 was silent (stopped, or its interpreter held up)"  # it could not tell


def test_the_chain_begins_where_somebody_waits_for_the_silent_rank():
    reports = [waits(0, "grpo", "grpo", "collective: agree"), waits(1, "grpo", "grpo", "collective: gradient")]
    assert culprit(reports, [0]).endswith(
        "; lane grpo of rank 1 (waiting, collective: gradient) waits for lane grpo of rank 0"
    )


def test_a_collective_that_all_are_in_is_told_of_all():
    reports = [waits(rank, "grpo", "grpo", "collective: gradient") for rank in (0, 1)]
    assert culprit(reports, []) == (
        "lanes wait for each other: lane grpo of rank 0 (waiting, collective: gradient), "
        "lane grpo of rank 1 (waiting, collective: gradient)"
    )


def test_lanes_whose_turn_it_is_not_are_no_part_of_it():
    """As in the serial schedule."""
    idle = LaneReport(0, "inference", "idle", "", "", 99.0)
    reports = [idle, waits(0, "grpo", "sampling"), works(0, "sampling")]
    assert culprit(reports, []).startswith("lane sampling of rank 0 (busy) has not got on")


def test_nobody_to_blame_is_no_error():
    assert culprit([], []) == "lanes wait for each other: "
    assert culprit([], [0, 2]).count("was silent") == 2

from pearl.records.journal import GroupEntry, StepEntry
from pearl.testing.journal import ListSink
from pearl.testing.virtual_time import run_virtual


def group(number: int) -> GroupEntry:
    return GroupEntry(at_s=0, group=f"g{number}", task="t", seed=0, status="completed", admitted_version=0, attempts=1)


def test_entries_are_kept_in_order() -> None:
    sink = ListSink()
    for number in range(1000):
        sink.write(group(number))
    assert [entry.group for entry in sink.of(GroupEntry)] == [f"g{number}" for number in range(1000)]
    assert sink.of(StepEntry) == []
    assert sink.dropped == 0


def test_a_full_sink_counts_what_it_drops_until_it_is_flushed() -> None:
    sink = ListSink(capacity=2)
    for number in range(5):
        sink.write(group(number))
    assert (len(sink.entries), sink.dropped, sink.flushes) == (2, 3, 0)
    run_virtual(sink.flush())
    sink.write(group(9))
    assert [entry.group for entry in sink.of(GroupEntry)] == ["g0", "g1", "g9"]
    assert (sink.dropped, sink.flushes) == (3, 1)

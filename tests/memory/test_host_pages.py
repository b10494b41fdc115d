"""Who must wait for pages on their way to the host, and who need not."""

from helmrec.memory.host_pages import SavesInFlight
from helmrec.memory.kv_host_tier import PageSave


class Copy:
    """A copy that ends when told."""

    has_ended = False

    def query(self) -> bool:
        return self.has_ended


def test_only_a_page_being_saved_may_not_be_written() -> None:
    saves = SavesInFlight()
    saves.add([PageSave(page=3, slot=7), PageSave(page=4, slot=8)], Copy().query)
    assert saves.read_any([9, 4])
    assert not saves.read_any([7, 8, 9])
    assert not saves.read_any([])


def test_only_a_slot_being_written_may_not_be_read() -> None:
    saves = SavesInFlight()
    saves.add([PageSave(page=3, slot=7)], Copy().query)
    assert saves.write_any([1, 7])
    assert not saves.write_any([3])


def test_what_has_ended_holds_up_nobody() -> None:
    saves, first, second = SavesInFlight(), Copy(), Copy()
    saves.add([PageSave(page=1, slot=1)], first.query)
    saves.add([PageSave(page=2, slot=2)], second.query)
    first.has_ended = True
    assert not saves.read_any([1])
    assert saves.read_any([2])
    second.has_ended = True
    assert not saves.read_any([2])
    assert not saves.write_any([1, 2])

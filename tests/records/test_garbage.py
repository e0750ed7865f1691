import gc
from collections.abc import Generator

import pytest

from tunesmith.records import garbage


@pytest.fixture(autouse=True)
def thresholds() -> Generator[None]:
    before = gc.get_threshold()
    gc.unfreeze()  # what other tests have left out
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_a_start_collects_rarely_and_then_as_before() -> None:
    gc.set_threshold(700, 11, 12)
    garbage.collect_rarely()
    garbage.collect_rarely()
    assert gc.get_threshold() == garbage.RARELY
    kept = [{"imported": 1}]
    assert any(each is kept for each in gc.get_objects())
    garbage.collect_as_usual()
    assert gc.get_threshold() == (700, 11, 12)
    assert all(each is not kept for each in gc.get_objects()), "collections leave it out"


def test_after_a_run_in_a_program_everything_is_collected_again() -> None:
    gc.set_threshold(700, 11, 12)
    kept = [{"imported": 1}]
    with garbage.of_a_run():
        assert gc.get_threshold() == garbage.RARELY
        garbage.collect_as_usual()
        assert gc.get_threshold() == (700, 11, 12)
        assert all(each is not kept for each in gc.get_objects())
    assert gc.get_threshold() == (700, 11, 12)
    assert any(each is kept for each in gc.get_objects())


def test_a_run_that_is_refused_leaves_collections_as_they_were() -> None:
    gc.set_threshold(700, 11, 12)
    with pytest.raises(ValueError), garbage.of_a_run():
        raise ValueError
    assert gc.get_threshold() == (700, 11, 12) and not gc.get_freeze_count()


def test_nothing_changes_in_a_process_that_did_not_start_so() -> None:
    gc.set_threshold(700, 11, 12)
    before = gc.get_freeze_count()
    garbage.collect_as_usual()
    assert gc.get_threshold() == (700, 11, 12)
    assert gc.get_freeze_count() <= before, "some of what was left out may end meanwhile"

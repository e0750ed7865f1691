import gc
from collections.abc import Generator

import pytest

from tunesmith.records import garbage


@pytest.fixture(autouse=True)
def thresholds() -> Generator[None]:
    before = gc.get_threshold()
    frozen = gc.get_freeze_count()
    yield
    gc.set_threshold(*before)
    if not frozen:
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


def test_nothing_changes_in_a_process_that_did_not_start_so() -> None:
    gc.set_threshold(700, 11, 12)
    before = gc.get_freeze_count()
    garbage.collect_as_usual()
    assert gc.get_threshold() == (700, 11, 12)
    assert gc.get_freeze_count() <= before, "some of what was left out may end meanwhile"

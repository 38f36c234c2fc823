"""One thread for small work, several for rows, and nothing that outlives the call."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from threading import Barrier, Thread, current_thread

import pytest
import torch

from winnowgp import linalg
from winnowgp.linalg import parallel_map, single_thread, threads_for


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def in_new_thread() -> int:
    """Return the number of threads that PyTorch has in a thread that has not used it yet."""
    seen: list[int] = []
    thread = Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


def test_single_thread_restores_the_setting_after_an_error() -> None:
    def fail() -> None:
        with single_thread():
            assert torch.get_num_threads() == 1
            with single_thread():
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.get_num_threads() == 3


@pytest.mark.skipif(not os.path.exists("/proc"), reason="other platforms have no such function")
def test_single_thread_leaves_other_threads_alone() -> None:
    with single_thread():
        assert in_new_thread() == 3
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 3
        with single_thread():
            assert pool.submit(torch.get_num_threads).result() == 3


def test_single_thread_without_openmp_restores_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise OSError

    monkeypatch.setattr(linalg.ctypes, "CDLL", missing)
    linalg._thread_setters.cache_clear()
    try:
        with single_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
    finally:
        linalg._thread_setters.cache_clear()


def test_threads_for_small_work_is_one() -> None:
    with threads_for(1e6):
        assert torch.get_num_threads() == 1
    with threads_for(1e12):
        assert torch.get_num_threads() == 3


@pytest.mark.parametrize("outer", [nullcontext, single_thread])
def test_parallel_map_runs_at_once_and_keeps_the_order(
    outer: Callable[[], AbstractContextManager[None]],
) -> None:
    together = Barrier(3, timeout=20)

    def call(item: int) -> tuple[int, int, bool, str]:
        together.wait()
        return item, torch.get_num_threads(), torch.is_grad_enabled(), current_thread().name

    with torch.no_grad(), outer():
        results = parallel_map(call, [5, 6, 7])
    assert [result[:3] for result in results] == [(5, 1, False), (6, 1, False), (7, 1, False)]
    assert len({name for *_, name in results}) == 3
    assert torch.get_num_threads() == 3


def test_parallel_map_in_sequence_uses_the_calling_thread() -> None:
    def call(item: int) -> tuple[int, int, str]:
        return item, torch.get_num_threads(), current_thread().name

    own = current_thread().name
    assert parallel_map(call, [5, 6], parallel=False) == [(5, 1, own), (6, 1, own)]
    assert parallel_map(call, [5]) == [(5, 3, own)]
    assert parallel_map(call, []) == []


def test_parallel_map_within_itself_runs_in_sequence() -> None:
    def names(_: int) -> list[str]:
        return parallel_map(lambda _: current_thread().name, range(3))

    for inner in parallel_map(names, range(3)):
        assert len(set(inner)) == 1


def test_parallel_map_raises_the_error_of_a_call() -> None:
    with pytest.raises(ZeroDivisionError):
        parallel_map(lambda item: 1 // item, [1, 0, 2])
    assert parallel_map(lambda item: 1 // item, [1, 2]) == [1, 0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parallel_map_works_in_a_forked_process() -> None:
    assert parallel_map(lambda item: item + 1, [1, 2]) == [2, 3]
    child = os.fork()
    if not child:
        os._exit(0 if parallel_map(lambda item: item + 1, [1, 2]) == [2, 3] else 1)
    assert os.waitpid(child, 0)[1] == 0

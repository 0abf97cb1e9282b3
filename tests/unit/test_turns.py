"""Turns of an event loop."""

import asyncio
import threading

import pytest

from rose.serving.turns import Turns


def drive(scenario):
    asyncio.run(asyncio.wait_for(scenario(), 20))


async def end(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_there_is_a_first_turn_and_one_for_all_that_ask_before_it():
    async def scenario():
        taken = []
        turns = Turns(lambda: taken.append(threading.get_ident()))
        turns.ask()  # nobody runs them yet: the first one is for this
        task = asyncio.create_task(turns.run())
        await asyncio.sleep(0.01)
        assert len(taken) == 1
        for _ in range(3):
            turns.ask()
        assert len(taken) == 1
        await asyncio.sleep(0.01)
        assert taken == [threading.get_ident()] * 2
        await end(task)

    drive(scenario)


def test_a_turn_can_ask_for_another_and_others_are_not_kept_waiting():
    async def scenario():
        taken = 0

        def take():
            nonlocal taken
            taken += 1
            turns.ask()

        turns = Turns(take)
        task = asyncio.create_task(turns.run())
        for _ in range(20):
            await asyncio.sleep(0)
        assert 10 < taken < 30
        await end(task)

    drive(scenario)


def test_a_thread_can_ask_and_the_turn_is_the_loops():
    async def scenario():
        taken = asyncio.Queue()
        turns = Turns(lambda: taken.put_nowait(threading.get_ident()))
        task = asyncio.create_task(turns.run())
        await taken.get()
        thread = threading.Thread(target=turns.ask_from_thread)
        thread.start()
        assert await taken.get() == threading.get_ident()
        thread.join()
        await end(task)

    drive(scenario)


def test_an_error_ends_the_turns_and_is_raised():
    async def scenario():
        taken = 0

        def take():
            nonlocal taken
            taken += 1
            turns.ask()
            raise ZeroDivisionError("no more")

        turns = Turns(take)
        with pytest.raises(ZeroDivisionError, match="no more"):
            await turns.run()
        await asyncio.sleep(0.01)
        assert taken == 1

    drive(scenario)


def test_nothing_is_done_once_they_have_ended():
    turns, taken = None, []

    async def scenario():
        nonlocal turns
        turns = Turns(lambda: taken.append(1))
        task = asyncio.create_task(turns.run())
        await asyncio.sleep(0.01)
        turns.ask()
        await end(task)
        turns.ask()
        turns.ask_from_thread()
        await asyncio.sleep(0.01)
        assert len(taken) <= 2

    drive(scenario)
    count = len(taken)
    turns.ask_from_thread()  # its loop is closed
    assert len(taken) == count

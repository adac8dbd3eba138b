"""How threads of a persistent kernel wait for packets, and recognise them, on the CPU.

test_persistent.py shows that they compute with the right packets.
"""

import subprocess
from dataclasses import dataclass

import pytest
from emulator.persistent import EXCHANGE

ENOUGH = 1 << 20  # reads, more than any wait here takes
NEVER = -1
LOOKS_ALONE = 64  # reads before a thread checks whether another one has given up


@dataclass(frozen=True)
class Wait:
    """One lane's reads of missing packets, and the number of packets that they loaded."""

    looks: int
    packets: int
    looks_at_others: int
    is_complete: bool


def waits(sent_at, spin_limit=ENOUGH, given_up_at=NEVER, tiles=2):
    """How the lanes of a warp wait until packets arrive; times are counted in reads."""
    command = [EXCHANGE.make(), tiles, spin_limit, given_up_at]
    done = subprocess.run(
        [*map(str, command), *map(str, sent_at)], capture_output=True, text=True, timeout=60
    )
    lines = [[int(number) for number in line.split()] for line in done.stdout.splitlines()]
    assert len(lines) == 32, done.stdout + done.stderr
    return [Wait(*numbers[:3], bool(numbers[3])) for numbers in lines]


@pytest.mark.parametrize(
    ("sent_at", "beside"),
    [
        ((200,), 0),
        ((200, 200), 0),
        ((200, 200, 200, 200), 2),  # the first one, then the three others in one read
        ((50, 100, 150, 200), 2 + 1),  # each arrival is followed by a read of all others
        ((200, 150, 100, 50), 2),
        ((50, 200, 50, 200), 2),
        ((1, 1, 1, 200), 2),
    ],
    ids=str,
)
def test_one_packet_is_asked_for_while_none_comes(sent_at, beside):
    """Where a group has several tiles. ``beside``: packets that are loaded with another one."""
    for wait in waits(sent_at):
        assert wait.is_complete
        assert wait.looks >= max(sent_at) - 1
        assert wait.packets <= wait.looks + beside


@pytest.mark.parametrize(
    "sent_at", [(200,), (200, 200), (50, 100, 150, 200), (200, 1, 1, 1)], ids=str
)
def test_all_missing_packets_of_a_single_tile_are_asked_for(sent_at):
    for wait in waits(sent_at, tiles=1):
        assert wait.is_complete
        assert max(sent_at) - 1 <= wait.looks <= max(sent_at) + 1
        assert abs(wait.packets - sum(sent_at)) <= len(sent_at)


@pytest.mark.parametrize("packets", [1, 2, 4])
def test_others_are_asked_rarely_whether_they_have_given_up(packets):
    for wait in waits([1000] * packets):
        assert wait.is_complete
        assert wait.looks_at_others == wait.looks // LOOKS_ALONE > 10


@pytest.mark.parametrize("packets", [1, 2, 4])
def test_a_thread_gives_up(packets):
    """A thread gives up at its own limit, and soon after another one has given up."""
    for wait in waits([NEVER] * packets, spin_limit=1000):
        assert not wait.is_complete
        assert 1000 <= wait.looks < 1000 + LOOKS_ALONE
        assert wait.packets == wait.looks
    for wait in waits([NEVER] * packets, given_up_at=500):
        assert not wait.is_complete
        assert wait.looks < 500 + LOOKS_ALONE

"""By the clock at the socket nobody learns that somebody else has stored a prompt."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from strongroom.wire.frames import Finish, Verdict
from tests.sidecar.conftest import Stored
from tests.sidecar.control_plane import Granted
from tests.timing import Ask, told_apart

ABSENT = list(range(9000, 9300))


async def test_the_clock_does_not_tell_anothers_prompt_from_one_that_nobody_stored(
    stored: Stored,
) -> None:
    world = stored.world
    other = world.control.tenant()
    names = (f"r{number}" for number in itertools.count())

    def asks(prompt: Sequence[int]) -> Ask:
        granted = world.control.grant(other, prompt)

        async def ask() -> None:
            name = next(names)
            assert await stored.engine.open(name, granted) == Verdict(name, True, 0, True)
            stored.engine.scheduler.send(Finish(name))

        return ask

    assert await stored.hits("right party", stored.grant()) == 288
    told = await told_apart(asks(stored.prompt), asks(ABSENT))
    assert told.is_a_guess, told


async def test_the_clock_does_not_tell_a_revoked_grant_from_one_for_another_prompt(
    stored: Stored,
) -> None:
    world = stored.world
    group = world.control.component()
    spans = [(300, (), (group,))]
    revoked = world.control.grant(world.tenant, stored.prompt, spans)
    denied = world.control.grant(world.tenant, stored.prompt, prompt_digest="ab" * 32)
    names = (f"r{number}" for number in itertools.count())
    entry = world.control.revoke(group)
    await world.control.until_acked("fenced", entry.seq)

    def asks(granted: Granted) -> Ask:
        async def ask() -> None:
            name = next(names)
            assert await stored.engine.open(name, granted) == Verdict(name, False, 0, False)

        return ask

    told = await told_apart(asks(revoked), asks(denied))
    assert told.is_a_guess, told

"""Rate limits: how many requests a principal, a tenant, a sidecar and an address may make.

Rules:
- Whom a request counts for is what was proven: tenant and subject, or the sidecar. Not the
  token: whoever has many tokens is one principal still. A tenant's limit is over all of its
  principals, so that many names do not help either.
- A sliding window of a minute (`limits`): a burst at a minute's turn is not worth two.
- Memory is bounded by `subjects_max` windows; the one that was used longest ago is forgotten
  first, and that one had the least to remember.
- Each process of the service counts for itself: with N replicas up to N times as much gets in.
- Enrolment, which nobody has to prove anything for before it writes to the audit, counts for
  the address that it came from.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.storage.base import SlidingWindowCounterSupport, Storage
from limits.strategies import SlidingWindowCounterRateLimiter

from strongroom.clock import Clock
from strongroom.errors import Overloaded

WINDOW_S: Final = 60
_NS: Final = 1_000_000_000


class TooMany(Overloaded):
    """This caller makes more requests than it may; it may go on after `retry_after_s`."""

    code = "rate_limited"

    def __init__(self, policy: str, limit: int, retry_after_s: int) -> None:
        super().__init__(f"too many requests of one {policy}", limit=limit)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Standing:
    """What is left of one limit, as `RateLimit` and `RateLimit-Policy` say it."""

    policy: str
    limit: int
    remaining: int
    reset_s: int

    def headers(self) -> dict[str, str]:
        """draft-ietf-httpapi-ratelimit-headers-10."""
        return {
            "RateLimit-Policy": f'"{self.policy}";q={self.limit};w={WINDOW_S}',
            "RateLimit": f'"{self.policy}";r={self.remaining};t={self.reset_s}',
        }


@dataclass(frozen=True, slots=True)
class RateRules:
    """Requests a minute, and how many windows are remembered."""

    principal: int
    tenant: int
    sidecar: int
    address: int
    subjects_max: int


class Rates:
    """Counts requests; used from the event loop only."""

    def __init__(self, rules: RateRules, clock: Clock) -> None:
        self._windows = Windows(clock, rules.subjects_max)
        self._limiter = SlidingWindowCounterRateLimiter(self._windows)
        self._items: dict[str, RateLimitItem] = {
            "principal": RateLimitItemPerMinute(rules.principal),
            "tenant": RateLimitItemPerMinute(rules.tenant),
            "sidecar": RateLimitItemPerMinute(rules.sidecar),
            "address": RateLimitItemPerMinute(rules.address),
        }

    def principal(self, tenant: str | None, subject: str) -> Standing:
        """Count a request of `subject`. Raises `TooMany`."""
        standing = self._take("principal", tenant or "-", subject)
        if tenant is not None:
            self._take("tenant", tenant)
        return standing

    def sidecar(self, sidecar: str) -> Standing:
        """Count a request of a sidecar that has proven itself. Raises `TooMany`."""
        return self._take("sidecar", sidecar)

    def address(self, address: str) -> Standing:
        """Count a request of nobody, from `address`. Raises `TooMany`."""
        return self._take("address", address)

    def _take(self, policy: str, *whom: str) -> Standing:
        item = self._items[policy]
        allowed = self._limiter.hit(item, policy, *whom)
        key = item.key_for(policy, *whom)
        before, before_s, now, now_s = self._windows.get_sliding_window(key, item.get_expiry())
        used = before * before_s / WINDOW_S + now
        if not allowed:
            raise TooMany(policy, item.amount, _wait_s(item.amount, before, before_s, now, now_s))
        remaining = max(0, item.amount - math.ceil(used))
        return Standing(policy, item.amount, remaining, max(1, math.ceil(now_s)))


def _wait_s(limit: int, before: int, before_s: float, now: int, now_s: float) -> int:
    """Whole seconds until one more fits: as the window before fades, or as this one does."""
    over = before * before_s / WINDOW_S + now + 1 - limit
    if before and now < limit and over * WINDOW_S / before < before_s:
        return max(1, math.ceil(over * WINDOW_S / before))
    return max(1, math.ceil(now_s + WINDOW_S * max(0, now + 1 - limit) / max(1, now)))


@dataclass(slots=True)
class _Window:
    number: int
    before: int
    now: int


class Windows(Storage, SlidingWindowCounterSupport):
    """The windows of the library's strategy, in bounded memory and by our own clock.

    The library's own store in memory has no bound, reads the wall clock and needs a thread.
    """

    STORAGE_SCHEME = None

    def __init__(self, clock: Clock, windows_max: int) -> None:
        super().__init__()
        self._clock = clock
        self._windows_max = windows_max
        self._known: OrderedDict[str, _Window] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def base_exceptions(self) -> type[Exception]:
        """What the library would wrap: nothing is raised here."""
        return ValueError

    def acquire_sliding_window_entry(
        self, key: str, limit: int, expiry: int, amount: int = 1
    ) -> bool:
        """Take `amount` if it fits."""
        window, before_s, _ = self._at(key, expiry)
        if math.floor(window.before * before_s / expiry + window.now) + amount > limit:
            return False
        window.now += amount
        return True

    def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        """Count of the window before, seconds that it still counts, this one's two."""
        window, before_s, now_s = self._at(key, expiry)
        return window.before, before_s, window.now, now_s

    def clear_sliding_window(self, key: str, expiry: int) -> None:
        """Forget `key`."""
        del expiry
        self.clear(key)

    def _at(self, key: str, expiry: int) -> tuple[_Window, float, float]:
        number, past_ns = divmod(self._clock(), expiry * _NS)
        window = self._known.get(key)
        if window is None:
            while len(self._known) >= self._windows_max:
                self._known.popitem(last=False)
            window = self._known[key] = _Window(number, 0, 0)
        elif window.number != number:
            window.before = window.now if window.number == number - 1 else 0
            window.number, window.now = number, 0
        self._known.move_to_end(key)
        left_s = expiry - past_ns / _NS
        return window, left_s, left_s

    def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        """Count without a limit."""
        window, _, _ = self._at(key, expiry)
        window.now += amount
        return window.now

    def get(self, key: str) -> int:
        """The count of `key`'s last window."""
        window = self._known.get(key)
        return 0 if window is None else window.now

    def get_expiry(self, key: str) -> float:
        """Windows end with the minute; the strategy in use does not ask."""
        del key
        return self._clock() / _NS

    def check(self) -> bool:
        """It is there."""
        return True

    def reset(self) -> int | None:
        """Forget everything."""
        count = len(self._known)
        self._known.clear()
        return count

    def clear(self, key: str) -> None:
        """Forget `key`."""
        self._known.pop(key, None)

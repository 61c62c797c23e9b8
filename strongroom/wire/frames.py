"""The frames, version 1. Tags are append-only; a field's meaning never changes.

One engine opens one connection from its scheduler (`Open`, `Finish`, `Cancel`, `Report`, `Hint`,
`Unhint`) and one from each worker rank (`Load`, `Copied`, `Save`, `Filled`). All of them say
`Hello` first, with the same `engine` id, and form one session set in the sidecar. The sidecar
answers `Welcome`; to a worker it sends, with that very frame, the staging memfd as SCM_RIGHTS.
A gateway opens a connection of its own for each engine that it gives hints for, and says `Greet`.

A request's life: the scheduler sends `Open` as soon as the engine knows the request and gets
one `Verdict`. Workers then `Load` and `Save` under the same `request`. The scheduler ends it
with `Finish` (orderly) or `Cancel` (aborted: transfers that can still stop, stop).

A load: `Load` -> one `Part` for each block as it opens -> `LoadDone` or `LoadFailed`. After
copying a part out of staging, before its deadline, the worker says `Copied`; that frees it.

A save: `Save` -> `Slots` (staging for the blocks that are not stored yet; may be empty) ->
the worker fills them -> `Filled` for each -> `SaveDone` once every slot is sealed or dropped.

Times on the wire are nanoseconds of the host's boot clock (CLOCK_BOOTTIME), which both ends
share and which no one sets back.
"""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 1


class KVFormatFields(msgspec.Struct, frozen=True):
    """`strongroom.kvformat.KVFormat` on the wire."""

    dtype: str
    quantization: str
    layers: int
    kv_heads: int
    head_size: int
    attention: str
    rope: str


class LayoutFields(msgspec.Struct, frozen=True):
    """`strongroom.kvformat.Layout` on the wire."""

    order: str
    isa: str
    page_tokens: int
    page_bytes: tuple[int, ...]
    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int


class Digests(msgspec.Struct, frozen=True):
    """What the engine measured, each as lowercase hexadecimal SHA-256."""

    model: str
    tokenizer: str
    template: str


def _unprinted(frame: msgspec.Struct) -> str:
    """`repr` of a frame that carries a token, a salt or a grant: its kind and nothing of it."""
    return f"{type(frame).__name__}(...)"


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame of every connection. `token` is the content of the per-engine token file."""

    version: int
    engine: str
    role: str
    """`scheduler` or `worker`."""
    token: str
    digests: Digests
    format: KVFormatFields
    layout: LayoutFields
    """The scheduler sends rank 0's."""

    __repr__ = _unprinted


class Greet(msgspec.Struct, frozen=True, tag="greet"):
    """First frame of a gateway, which is no engine: it may send `Hint`, `Unhint` and `Ping` alone.

    `token` is the content of that gateway's own token file. Its hints are for `engine`. Answered
    by `Welcome` with no staging, whether or not that engine is connected.
    """

    version: int
    name: str
    token: str
    engine: str

    __repr__ = _unprinted


class Open(msgspec.Struct, frozen=True, tag="open"):
    """A request has reached the engine. `tokens` are its prompt's ids, u32 little-endian."""

    request: str
    grant: str
    salt: str
    """The request's `cache_salt`; empty when it brought none."""
    tokens: bytes
    adapter: str
    """Digest of the adapter's weights as measured, or `none`."""
    extras: bytes = b""

    __repr__ = _unprinted


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Bring tokens `[start, end)`; both are whole pages, `end` at most the verdict's."""

    request: str
    load: int
    start: int
    end: int
    layers: bool = False
    """Also say `Layers` while a block is being opened."""


class Copied(msgspec.Struct, frozen=True, tag="copied"):
    """The part at `offset` of this load has been copied out of staging."""

    load: int
    offset: int


class Save(msgspec.Struct, frozen=True, tag="save"):
    """The KV of the prompt's first `end` tokens is final. `end` counts whole pages."""

    request: str
    save: int
    end: int


class Filled(msgspec.Struct, frozen=True, tag="filled"):
    """The slot at `offset` holds the block's bytes; `ok` false gives the slot back unused."""

    save: int
    offset: int
    ok: bool


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The request was aborted."""

    request: str


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The request ended; saves in flight go on."""

    request: str


class Report(msgspec.Struct, frozen=True, tag="report"):
    """How the engine is doing, from its scheduler ten times a second; counters since its start.

    Used for cost and degradation alone: nothing that is said here widens what may be served.
    """

    pages: int
    free_pages: int
    running: int
    waiting: int
    prefill_tokens: int
    """Prompt tokens computed, in steps that computed prompts."""
    prefill_us: int
    """Time that those steps took."""
    busy_us: int
    idle_us: int
    """Time without a step in flight while requests were waiting for a load."""
    prefill_steps: int = 0
    """Steps that computed prompts; 0 from an engine that does not count them."""


class Hint(msgspec.Struct, frozen=True, tag="hint"):
    """A request with this grant is on its way: bring what it may read nearer.

    From a scheduler or a gateway. Judged like an `Open`, answered by nothing; `start_in_ms` says
    when the request is expected to be scheduled.
    """

    hint: str
    grant: str
    salt: str
    tokens: bytes
    adapter: str
    start_in_ms: int
    extras: bytes = b""

    __repr__ = _unprinted


class Unhint(msgspec.Struct, frozen=True, tag="unhint"):
    """The hinted request will not come."""

    hint: str


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Answered by `Pong` with the same number."""

    number: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The session is open. `staging_bytes` is 0 for a scheduler, and no descriptor follows."""

    version: int
    session: str
    tokens_per_block: int
    staging_bytes: int


class Verdict(msgspec.Struct, frozen=True, tag="verdict"):
    """What the engine may do with a request.

    `allowed` false: load and save nothing, and skip the engine's own prefix cache. Absent,
    denied, revoked and corrupt are not told apart here. `tokens` is the stored prefix in whole
    pages; 0 is a miss. `save` says that saving is granted.
    """

    request: str
    allowed: bool
    tokens: int
    save: bool


class Lease(msgspec.Struct, frozen=True, tag="lease"):
    """Until when the sidecar may serve, as far as it knows now (boot clock).

    Sent to a scheduler after `Welcome` and at every renewal, in order with `Fenced`. Past the
    latest one a verdict allows nothing, the engine's own prefix cache included: a sidecar that
    is cut off from the service cannot know what was revoked meanwhile.
    """

    deadline_ns: int


class Fenced(msgspec.Struct, frozen=True, tag="fenced"):
    """The request was invalidated: treat it from now on as not allowed."""

    request: str


class Part(msgspec.Struct, frozen=True, tag="part"):
    """Tokens `[start, end)` lie in staging at `offset`, layer after layer, pages in order.

    `end` may lie beyond the end that was asked for (a block opens as a whole). After
    `deadline_ns` (boot clock) the bytes must not be used.
    """

    load: int
    start: int
    end: int
    offset: int
    deadline_ns: int


class Layers(msgspec.Struct, frozen=True, tag="layers"):
    """The first `layers` layers of the part that will be at `offset` are good already.

    Sent only for a `Load` that asked for it, in rising order; `Part` says that all of them are.
    After `deadline_ns` (boot clock) the bytes must not be used. Until `Part` the slot may still
    be zeroed by a failure: a load that then fails takes back what its `Layers` said.
    """

    load: int
    start: int
    end: int
    offset: int
    layers: int
    deadline_ns: int


class LoadDone(msgspec.Struct, frozen=True, tag="load_done"):
    """Every part of the load has been sent. `deadline_ns`: the lease under which it was."""

    load: int
    deadline_ns: int


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed"):
    """Nothing at or after token `start` will come; parts before it are good."""

    load: int
    start: int


class Slot(msgspec.Struct, frozen=True):
    """Staging for the block of tokens `[start, end)`, in the layout of a `Part`."""

    start: int
    end: int
    offset: int


class Slots(msgspec.Struct, frozen=True, tag="slots"):
    """Where to put the blocks of a save. Empty: nothing to do, or no room (backpressure)."""

    save: int
    slots: tuple[Slot, ...]


class SaveDone(msgspec.Struct, frozen=True, tag="save_done"):
    """The save has ended; `stored` blocks became resident."""

    save: int
    stored: int


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answer to `Ping`."""

    number: int


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """A typed error. After a `protocol` failure the sidecar closes the connection."""

    code: str
    message: str
    field: str | None = None
    limit: str | int | None = None


EngineFrame = (
    Hello
    | Greet
    | Open
    | Load
    | Copied
    | Save
    | Filled
    | Cancel
    | Finish
    | Ping
    | Report
    | Hint
    | Unhint
)
SidecarFrame = (
    Welcome
    | Verdict
    | Lease
    | Fenced
    | Part
    | Layers
    | LoadDone
    | LoadFailed
    | Slots
    | SaveDone
    | Pong
    | Failure
)

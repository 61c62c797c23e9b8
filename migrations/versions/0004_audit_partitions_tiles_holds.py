"""The audit: partitions by month, tiles instead of nodes, categories, legal holds.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_TILE = 256
_PAGE = 16_384
_AHEAD = 3
_EVENTS = (
    "seq, at, occurred_at, kind, actor_kind, actor, tenant, subject, target, outcome, reason, "
    "details, prev, hash"
)
_OLD_INDICES: dict[str, tuple[tuple[str, ...], ...]] = {
    "audit_events": (
        ("kind", "seq"),
        ("occurred_at",),
        ("target", "seq"),
        ("tenant", "occurred_at"),
        ("tenant", "seq"),
    ),
    "audit_references": (("reference",),),
}
_INDICES: dict[str, tuple[tuple[str, ...], ...]] = {
    "audit_events": (
        ("occurred_at", "seq"),
        ("tenant", "occurred_at", "seq"),
        ("tenant", "subject", "occurred_at", "seq"),
        ("actor", "occurred_at", "seq"),
        ("kind", "occurred_at", "seq"),
        ("target", "occurred_at", "seq"),
    ),
    "audit_references": (("reference", "occurred_at", "seq"),),
}
_PARTIAL = (
    ("ix_audit_events_denied_occurred_at_kind_reason", "audit_events", "category = 'denied'"),
    (
        "ix_audit_events_denied_tenant_occurred_at_kind_reason",
        "audit_events",
        "category = 'denied'",
    ),
    ("ix_audit_events_key_tenant_occurred_at_seq", "audit_events", "category = 'key'"),
    ("ix_audit_events_alarm_occurred_at_seq", "audit_events", "category = 'alarm'"),
    ("ix_audit_references_served", "audit_references", "category = 'served'"),
    ("ix_audit_references_alien", "audit_references", "alien"),
)
_PARTIAL_COLUMNS = {
    "ix_audit_events_denied_occurred_at_kind_reason": ["occurred_at", "kind", "reason"],
    "ix_audit_events_denied_tenant_occurred_at_kind_reason": [
        "tenant",
        "occurred_at",
        "kind",
        "reason",
    ],
    "ix_audit_events_key_tenant_occurred_at_seq": ["tenant", "occurred_at", "seq"],
    "ix_audit_events_alarm_occurred_at_seq": ["occurred_at", "seq"],
    "ix_audit_references_served": ["occurred_at", "reference"],
    "ix_audit_references_alien": ["occurred_at", "seq"],
}
_CATEGORY = """CASE
    WHEN outcome = 'alarm' THEN 'alarm'
    WHEN outcome IN ('denied', 'refused') THEN 'denied'
    WHEN kind LIKE 'access.%' AND outcome = 'miss' AND reason IN
        ('permission', 'identity', 'revoked', 'lease', 'expired', 'prompt') THEN 'denied'
    WHEN kind LIKE 'access.%' AND outcome IN ('hit', 'stored', 'ok') THEN 'served'
    WHEN kind LIKE 'access.%' THEN 'missed'
    WHEN kind LIKE 'key.%' THEN 'key'
    WHEN kind = 'grant.issued' THEN 'grant'
    ELSE 'control' END"""


def upgrade() -> None:
    _set_aside(_OLD_INDICES)
    _create()
    _partition()
    op.execute(
        f"INSERT INTO audit_events ({_EVENTS}, category) "  # noqa: S608 - constants
        f"SELECT {_EVENTS}, {_CATEGORY} FROM audit_events_before"
    )
    op.execute(
        "INSERT INTO audit_references (seq, reference, at, occurred_at, category, alien) "
        "SELECT r.seq, r.reference, e.at, e.occurred_at, e.category, "
        "e.category = 'served' AND length(r.reference) = 64 AND NOT EXISTS ("
        "SELECT 1 FROM namespaces n WHERE n.id = r.reference AND n.tenant = e.tenant) "
        "FROM audit_references_before r JOIN audit_events e ON e.seq = r.seq"
    )
    _tile()
    _index(_INDICES)
    for name, table, where in _PARTIAL:
        op.create_index(
            name,
            table,
            _PARTIAL_COLUMNS[name],
            postgresql_where=sa.text(where),
            sqlite_where=sa.text(where),
        )
    op.drop_table("audit_references_before")
    op.drop_table("audit_events_before")
    op.drop_table("audit_nodes")


def downgrade() -> None:
    connection = op.get_bind()
    size = connection.scalar(sa.text("SELECT size FROM audit_counter")) or 0
    if size != connection.scalar(sa.text("SELECT count(*) FROM audit_events")):
        raise RuntimeError("audit events were purged: the version before cannot keep such a log")
    for name, table, _ in _PARTIAL:
        op.drop_index(name, table_name=table)
    _set_aside(_INDICES)
    _create_old()
    op.execute(
        f"INSERT INTO audit_events ({_EVENTS}) "  # noqa: S608 - constants
        f"SELECT {_EVENTS} FROM audit_events_before"
    )
    op.execute(
        "INSERT INTO audit_references (seq, reference) "
        "SELECT seq, reference FROM audit_references_before"
    )
    _nodes()
    _index(_OLD_INDICES)
    op.drop_table("audit_references_before")
    op.drop_table("audit_events_before")
    op.drop_table("audit_tiles")
    op.drop_index(op.f("ix_audit_holds_tenant"), table_name="audit_holds")
    op.drop_table("audit_holds")


def _set_aside(indices: dict[str, tuple[tuple[str, ...], ...]]) -> None:
    """Rename the tables, and free the names of their indices and keys."""
    for table in ("audit_references", "audit_events"):
        for columns in indices[table]:
            op.drop_index(op.f(f"ix_{table}_{'_'.join(columns)}"), table_name=table)
        op.rename_table(table, f"{table}_before")
        if not _is_sqlite():
            op.execute(f"ALTER TABLE {table}_before DROP CONSTRAINT pk_{table} CASCADE")


def _index(indices: dict[str, tuple[tuple[str, ...], ...]]) -> None:
    for table, each in indices.items():
        for columns in each:
            op.create_index(op.f(f"ix_{table}_{'_'.join(columns)}"), table, list(columns))


def _event_columns() -> list[sa.Column[str]]:
    widths = {
        "kind": 64,
        "actor_kind": 32,
        "actor": 256,
        "subject": 256,
        "target": 256,
        "outcome": 32,
        "reason": 256,
        "prev": 64,
        "hash": 64,
    }
    return [
        *(
            sa.Column(name, sa.String(length=width), nullable=False)
            for name, width in widths.items()
        ),
        sa.Column("tenant", sa.String(length=32), nullable=True),
        sa.Column("details", sa.Text(), nullable=False),
    ]


def _moment(name: str, *, nullable: bool = False) -> sa.Column[str]:
    kind = sa.String(length=32)
    return sa.Column(
        name,
        kind if _is_sqlite() else sa.String(length=32, collation="C"),
        nullable=nullable,
    )


def _category() -> sa.Column[str]:
    return sa.Column(
        "category",
        sa.Enum(
            "served",
            "missed",
            "denied",
            "key",
            "grant",
            "alarm",
            "control",
            name="category",
            native_enum=False,
            create_constraint=True,
            length=32,
        ),
        nullable=False,
    )


def _create() -> None:
    op.create_table(
        "audit_events",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        _moment("at"),
        _moment("occurred_at"),
        _category(),
        *_event_columns(),
        sa.PrimaryKeyConstraint("seq", "at", name=op.f("pk_audit_events")),
        postgresql_partition_by="RANGE (at)",
    )
    op.create_table(
        "audit_references",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("reference", sa.String(length=64), nullable=False),
        _moment("at"),
        _moment("occurred_at"),
        _category(),
        sa.Column("alien", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("seq", "reference", "at", name=op.f("pk_audit_references")),
        postgresql_partition_by="RANGE (at)",
    )
    op.create_table(
        "audit_tiles",
        sa.Column("level", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("index", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("hashes", sa.LargeBinary(length=8192), nullable=False),
        sa.Column("root", sa.LargeBinary(length=32), nullable=False),
        sa.PrimaryKeyConstraint("level", "index", name=op.f("pk_audit_tiles")),
    )
    op.create_table(
        "audit_holds",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=32), nullable=True),
        _moment("since", nullable=True),
        _moment("until", nullable=True),
        sa.Column("reason", sa.String(length=1024), nullable=False),
        sa.Column("placed_by", sa.String(length=256), nullable=False),
        _moment("placed_at"),
        sa.Column("released_by", sa.String(length=256), nullable=True),
        _moment("released_at", nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_holds")),
    )
    op.create_index(op.f("ix_audit_holds_tenant"), "audit_holds", ["tenant"])


def _create_old() -> None:
    op.create_table(
        "audit_events",
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.String(length=32), nullable=False),
        sa.Column("occurred_at", sa.String(length=32), nullable=False),
        *_event_columns(),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_audit_events")),
    )
    op.create_table(
        "audit_references",
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("reference", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["seq"], ["audit_events.seq"], name=op.f("fk_audit_references_seq")
        ),
        sa.PrimaryKeyConstraint("seq", "reference", name=op.f("pk_audit_references")),
    )
    op.create_table(
        "audit_nodes",
        sa.Column("level", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("index", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("level", "index", name=op.f("pk_audit_nodes")),
    )


def _partition() -> None:
    """A partition for each month that there is and the next ones, and one for all else."""
    if _is_sqlite():
        return
    connection = op.get_bind()
    found = connection.execute(
        sa.text("SELECT DISTINCT substr(at, 1, 7) FROM audit_events_before")
    ).scalars()
    now = datetime.now(UTC)
    ahead = [_month(now.year * 12 + now.month - 1 + step) for step in range(_AHEAD)]
    for month in sorted({*found, *ahead}):
        number = int(month[:4]) * 12 + int(month[5:])
        for table in ("audit_events", "audit_references"):
            op.execute(
                f"CREATE TABLE {table}_{month.replace('-', '_')} PARTITION OF {table} "
                f"FOR VALUES FROM ('{month}') TO ('{_month(number)}')"
            )
    for table in ("audit_events", "audit_references"):
        op.execute(f"CREATE TABLE {table}_default PARTITION OF {table} DEFAULT")


def _month(number: int) -> str:
    return f"{number // 12:04d}-{number % 12 + 1:02d}"


def _leaves() -> list[bytes]:
    connection = op.get_bind()
    found: list[bytes] = []
    while True:
        rows = connection.execute(
            sa.text(
                "SELECT hash FROM audit_events WHERE seq >= :begin AND seq < :end ORDER BY seq"
            ),
            {"begin": len(found), "end": len(found) + _PAGE},
        ).scalars()
        page = [bytes.fromhex(value) for value in rows]
        found += page
        if len(page) < _PAGE:
            return found


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def _tile() -> None:
    """Tiles of every level from the events' own hashes."""
    tiles = sa.table(
        "audit_tiles",
        sa.column("level", sa.Integer()),
        sa.column("index", sa.BigInteger()),
        sa.column("hashes", sa.LargeBinary()),
        sa.column("root", sa.LargeBinary()),
    )
    level, nodes = 0, _leaves()
    while len(nodes) >= _TILE:
        roots = []
        for index in range(len(nodes) // _TILE):
            tile = nodes[index * _TILE : (index + 1) * _TILE]
            roots.append(_subtree(tile))
            op.execute(
                tiles.insert().values(
                    level=level, index=index, hashes=b"".join(tile), root=roots[-1]
                )
            )
        level, nodes = level + 1, roots


def _subtree(nodes: Sequence[bytes]) -> bytes:
    while len(nodes) > 1:
        nodes = [_node(nodes[at], nodes[at + 1]) for at in range(0, len(nodes), 2)]
    return nodes[0]


def _nodes() -> None:
    """Every complete subtree of two events or more, as the version before keeps them."""
    table = sa.table(
        "audit_nodes",
        sa.column("level", sa.Integer()),
        sa.column("index", sa.BigInteger()),
        sa.column("hash", sa.String()),
    )
    level, nodes = 0, _leaves()
    while len(nodes) > 1:
        level += 1
        pairs = range(0, len(nodes) - 1, 2)
        nodes = [_node(nodes[at], nodes[at + 1]) for at in pairs]
        rows = [
            {"level": level, "index": index, "hash": value.hex()}
            for index, value in enumerate(nodes)
        ]
        op.bulk_insert(table, rows)


def _is_sqlite() -> bool:
    return op.get_bind().dialect.name == "sqlite"

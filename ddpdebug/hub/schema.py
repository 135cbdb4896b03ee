"""The tables of the hub. `file` and `chunk` are the mirrored run directories, everything else is derived from them.

Times are seconds since the epoch by the hub's clock, unless a comment says that they are the run's own. Texts that
hold JSON are strict JSON in ASCII, so that nothing in them is beyond what a database stores (Postgres has no NUL).
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)

#: Another number is another database: there is no migration, the run directories are mirrored again.
VERSION = 1

metadata = MetaData()


def _of_run() -> Column[str]:
    return Column("run", Text, ForeignKey("run.key", ondelete="CASCADE"), primary_key=True)


_NUMBER = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by itself only where it reads INTEGER

about = Table("about", metadata, Column("name", Text, primary_key=True), Column("value", Text, nullable=False))

run = Table(
    "run",
    metadata,
    Column("key", Text, primary_key=True),  # as run directories are called: 20261121T083920Z-b71f2e
    Column("run_id", Text, nullable=False),
    Column("name", Text, nullable=False, default=""),
    Column("owner", Text, nullable=False, default=""),
    Column("job", Text, nullable=False, default=""),  # the scheduler's id
    Column("node", Text, nullable=False, default=""),  # of rank 0
    Column("world", BigInteger),
    Column("started", Double, nullable=False),  # the run's own
    Column("command", Text, nullable=False, default=""),
    Column("source", Text, nullable=False),  # push, watch or import
    Column("state", Text, nullable=False),  # states.STATES
    Column("outcome", Text),  # schema.run_state.OUTCOMES, once it has ended
    Column("exit_code", BigInteger),
    Column("first_seen", Double, nullable=False),
    Column("last_seen", Double, nullable=False),  # the last word of whoever mirrors it
    Column("changed", Double, nullable=False, index=True),  # when what pages show last became another
    Column("last_step", BigInteger),
    Column("last_step_at", Double),
    Column("rate", Double),  # steps a second, over about the last minute of training
    Column("severity", Text),  # the worst of the open findings
    Column("newest_finding", Text),  # its code
    Column("findings", BigInteger, nullable=False, default=0),
    Column("bytes", BigInteger, nullable=False, default=0),  # mirrored
    Column("width", BigInteger, nullable=False, default=1),  # steps in a bucket of its summary
    Column("document", Text),  # run.json
    Index("run_by_state", "state", "last_seen"),
)

file = Table(
    "file",
    metadata,
    _of_run(),
    Column("path", Text, primary_key=True),  # below the run directory, with slashes
    Column("size", BigInteger, nullable=False),
    Column("is_document", Boolean, nullable=False),  # replaced as a whole; others grow
    Column("digest", Text, nullable=False),  # CRC-32 of the content in hexadecimal
    Column("changed", Double, nullable=False),
    Column("folded", BigInteger, nullable=False, default=0),  # bytes of rows that are in the summary
)

chunk = Table(
    "chunk",
    metadata,
    _of_run(),
    Column("path", Text, primary_key=True),
    Column("start", BigInteger, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)

finding = Table(
    "finding",
    metadata,
    _of_run(),
    Column("id", Text, primary_key=True),
    Column("place", BigInteger, nullable=False),  # in the run directory's order
    Column("code", Text, nullable=False, index=True),
    Column("severity", Text, nullable=False),
    Column("title", Text, nullable=False),
    Column("step", BigInteger),
    Column("last_step", BigInteger),
    Column("count", BigInteger, nullable=False),
    Column("ranks", Text, nullable=False),  # JSON
    Column("subject", Text, nullable=False),  # JSON
    Column("open", Boolean, nullable=False),  # no hang that is over
    Column("time", Double),  # the run's own
    Column("first_seen", Double, nullable=False, index=True),
    Column("document", Text, nullable=False),  # the line of findings.jsonl
    Column("group", Text, nullable=False, index=True),  # findings of several runs that are of one kind
)

summary = Table(
    "summary",
    metadata,
    _of_run(),
    Column("rank", BigInteger, primary_key=True),
    Column("bucket", BigInteger, primary_key=True),  # step // run.width
    Column("first_step", BigInteger, nullable=False),
    Column("last_step", BigInteger, nullable=False),
    Column("steps", BigInteger, nullable=False),
    Column("loss_sum", Double, nullable=False),  # of the finite losses
    Column("losses", BigInteger, nullable=False),
    Column("loss_last", Double),
    Column("seconds_sum", Double, nullable=False),
    Column("seconds_max", Double, nullable=False),
    Column("differing", BigInteger, nullable=False),  # steps in which this rank was outvoted in something
)

rank = Table(
    "rank",
    metadata,
    _of_run(),
    Column("rank", BigInteger, primary_key=True),
    Column("node", Text),
    Column("local_rank", BigInteger),
    Column("device", Text),
    Column("metrics_url", Text),  # while it runs
    Column("phase", Text),  # what it does while ranks wait
    Column("last_step", BigInteger),
    Column("outcome", Text),  # reason of its end
    Column("stacks", Text),
)

note = Table(
    "note",
    metadata,
    Column("id", _NUMBER, primary_key=True, autoincrement=True),
    Column("group", Text, index=True),
    Column("run", Text, index=True),
    Column("kind", Text, nullable=False),  # ack, mute or note
    Column("text", Text, nullable=False, default=""),
    Column("author", Text, nullable=False, default=""),
    Column("time", Double, nullable=False),
    Column("until", Double),
)

delivery = Table(
    "delivery",
    metadata,
    Column("id", _NUMBER, primary_key=True, autoincrement=True),
    Column("target", Text, nullable=False),
    Column("run", Text, nullable=False),
    Column("finding", Text, nullable=False),
    Column("attempts", BigInteger, nullable=False, default=0),
    Column("next_at", Double, nullable=False),
    Column("done", Boolean, nullable=False, default=False),
    Index("delivery_once", "target", "run", "finding", unique=True),
)

#: Runs that were deleted for lack of room or for their age; whoever offers them again is told so.
forgotten = Table(
    "forgotten", metadata, Column("run", Text, primary_key=True), Column("time", Double, nullable=False, index=True)
)

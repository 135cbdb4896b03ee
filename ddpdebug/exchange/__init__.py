"""The exchange between the ranks: rows and messages cross in ticks, over a process group that torch does not know."""

from ddpdebug.exchange.ticks import Exchange as Exchange
from ddpdebug.schema.row import ROW_BYTES as ROW_BYTES

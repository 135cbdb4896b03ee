"""MEM: memory."""

"""What is put into torch while ddpdebug is attached."""

"""The life of an attached ddpdebug: attach, sample, answer, close."""

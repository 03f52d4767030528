"""Evaluations that can be trusted: seeded, paired, resumable, with intervals. Nothing in kvretain depends on it."""

"""Beam search: the search itself, its beams in the scheduler, and forks of sequences."""

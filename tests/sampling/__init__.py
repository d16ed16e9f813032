"""Tests of schedules, noise and the per-session stream."""

"""Measuring, held against a server that keeps a timetable, and against a real Triton."""

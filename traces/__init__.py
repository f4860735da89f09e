"""Workloads: reading every trace format, making synthetic ones."""
